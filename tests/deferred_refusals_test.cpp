// What can't be done with tensors that have no values yet: an error that names the operator or the parameter.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/tessera.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/sharded_helpers.h"
#include "tests/support/stack.h"

namespace tessera::test {
namespace {

using torch::Tensor;

template <class Wanted = ConfigError>
void expect_refused(const std::function<void(const Tensor&)>& construct, const std::vector<std::string>& words) {
  const torch::NoGradGuard no_grad;
  const Deferred scope;
  const auto tensor = torch::randn({4, 4});
  expect_words(refusal<Wanted>([&] { construct(tensor); }), words);
  tensor.mul_(2);  // the scope goes on
}

TEST(DeferredRefuses, ValuesReadByOperators) {
  const std::string pause = "Deferred::Pause";
  expect_refused([](const Tensor& t) { t[1][2].item<float>(); }, {"aten::item", "needs values", "plain numbers", pause});
  expect_refused([](const Tensor& t) { (void)torch::equal(t, t); }, {"aten::equal", "needs values", pause});
  expect_refused([](const Tensor& t) { (void)torch::allclose(t, t); }, {"aten::allclose", "needs values", pause});
  expect_refused([](const Tensor& t) { (void)t[0][0].is_nonzero(); }, {"aten::is_nonzero", "needs values", pause});
  expect_refused([](const Tensor& t) { torch::nn::init::sparse_(t, 0.5); }, {"aten::item", "needs values", pause});
}

TEST(DeferredRefuses, MemoryReadByHand) {
  const std::vector<std::string> words{"under tessera::Deferred", "data_ptr", "Deferred::Pause", "tessera::materialize"};
  expect_refused<c10::Error>([](const Tensor& t) { t.data_ptr<float>(); }, words);
  expect_refused<c10::Error>([](const Tensor& t) { t.mutable_data_ptr(); }, words);
  expect_refused<c10::Error>([](const Tensor& t) { t.accessor<float, 2>(); }, words);
  expect_refused<c10::Error>([](const Tensor& t) { t.t()[1].const_data_ptr(); }, words);
  expect_refused<c10::Error>([](const Tensor&) { torch::tensor(std::vector<float>{1, 2}); }, words);
  expect_refused<c10::Error>(
      [](const Tensor& t) {
        const Deferred::Pause pause;
        t.sum();
      },
      words);
}

TEST(DeferredRefuses, OperatorsThatCannotBeRunAgain) {
  expect_refused([](const Tensor& t) { t.resize_({2, 3}); }, {"aten::resize_"});
  expect_refused([](const Tensor& t) { torch::batch_norm(t, {}, {}, t[0], t[1], true, 0.1, 1e-5, false); },
                 {"aten::batch_norm", "doesn't declare"});
  expect_refused([](const Tensor& t) { (void)t.to_sparse(); }, {"aten::to_sparse", "not dense"});
  expect_refused([](const Tensor&) { torch::empty({3}, torch::kCUDA); }, {"aten::empty", "cuda", "on the CPU"});
  expect_refused([](const Tensor& t) { (void)t.to(torch::kCUDA); }, {"aten::to", "cuda", "on the CPU"});
  expect_refused(
      [](const Tensor& t) {
        const Tensor real = [] {
          const Deferred::Pause pause;
          return torch::zeros({4, 4});
        }();
        real.copy_(t);
      },
      {"aten::copy_", "aren't there yet", "[4, 4]"});
  expect_refused(
      [](const Tensor& t) {
        const torch::AutoGradMode grad(true);
        (void)(t.detach().requires_grad_(true) * 2);
      },
      {"aten::mul", "autograd", "NoGradGuard"});
}

TEST(DeferredRefuses, OperatorsThatFailWhenTheyAreRunAgain) {
  Stack net = deferred([] {
    Stack stack;
    const torch::NoGradGuard no_grad;
    stack->layers[2]->weight.index_fill_(0, torch::full({1}, 99, torch::kLong), 1.0);
    return stack;
  });
  expect_words(refusal<ConfigError>([&] { materialize(*net); }), {"aten::index_fill_", "tessera::Deferred", "run again"});
}

TEST(DeferredRefuses, TensorsOfAnotherThread) {
  Tensor other;
  std::thread([&] {
    const Deferred scope;
    other = torch::randn({3, 5});
  }).join();
  expect_refused([&](const Tensor&) { other.mul_(2); }, {"aten::mul_", "[3, 5]", "another thread"});
  materialize(std::vector<Tensor>{other});
  EXPECT_GT(other.abs().sum().item<float>(), 0);
}

TEST(DeferredRefuses, UseBeforeSharding) {
  Stack net = deferred([] { return Stack(); });
  const auto use = [&] { net->forward(torch::ones({1, 8})); };
  expect_words(refusal<GuardError>(use), {"aten::t", "'b0.weight'", "[8, 8]", "fully_shard", "materialize"});
  expect_words(refusal<GuardError>([&] { net->to(torch::kDouble); }), {"aten::to", "'b0.weight'"});
  expect_words(refusal<c10::Error>([&] { net->layers[1]->bias.data_ptr(); }), {"'b1.bias'", "tessera::Deferred"});
  Stack unnamed{nullptr};
  {
    const Deferred scope;
    unnamed = Stack();
  }
  expect_words(refusal<GuardError>([&] { unnamed->forward(torch::ones({1, 8})); }), {"aten::t", "[8, 8]"});
  materialize(*net);
  const Stack plain;
  EXPECT_TRUE(torch::equal(net->forward(torch::ones({1, 8})), Stack(plain)->forward(torch::ones({1, 8}))));
}

// ---- ranks that differ ---------------------------------------------------------------------------------------------

Stack stack_with(float last_bias) {
  Stack net;
  const torch::NoGradGuard no_grad;
  net->layers[3]->bias.fill_(last_bias);
  return net;
}

TEST(DeferredRefuses, RanksWithOtherValues) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = deferred([&] { return stack_with(static_cast<float>(world.rank.value)); });
        auto options = stack_options(placements);
        expect_words(refusal<AgreementError>([&] { fully_shard(net, mesh_for(world, placements), options); }),
                     {"initial values", "'b3.bias'", "rank 0 has hash", "rank 1 has hash", "same seed"});
        EXPECT_THROW(net->layers[0]->weight.data_ptr(), c10::Error) << "the module was touched";
        options.initial = Initial::broadcast;
        const auto sharded = fully_shard(net, mesh_for(world, placements), options);
        for (const auto& [name, value] : sharded.full_parameters())
          EXPECT_TRUE(name != "b3.bias" || torch::equal(value, torch::zeros({8})));
      },
      {2, 3});
}

TEST(DeferredRefuses, NothingWhereOneRankBuiltAtOnce) {
  on_ranks(3, [](World world) {
    auto net = world.rank.value == 1 ? stack_with(2) : deferred([] { return stack_with(2); });
    const auto sharded = fully_shard(net, Mesh(world), stack_options(zero3()));
    const auto plain = stack_with(2);
    const auto wanted = plain->named_parameters();
    for (const auto& [name, value] : sharded.full_parameters()) EXPECT_TRUE(torch::equal(value, wanted[name])) << name;
  });
}

}  // namespace
}  // namespace tessera::test
