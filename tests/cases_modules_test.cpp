// Published faults of sharded training, each with the numbers of the unsharded run (computed in fp64): what modules do with
// their parameters.
#include <gtest/gtest.h>

#include "tests/support/cases.h"

namespace tessera::test {
namespace {

using torch::nn::Linear;

struct OutputImpl : torch::nn::Module {
  explicit OutputImpl(const torch::Tensor& tied) : weight(register_parameter("weight", tied)) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight); }
  torch::Tensor weight;
};
TORCH_MODULE(Output);

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : e(register_module("e", torch::nn::Embedding(10, 6))),
        b(register_module("b", Linear(6, 6))),
        output(register_module("output", Output(e->weight))) {
    set_common_values(*this);
  }
  torch::Tensor forward(const torch::Tensor& tokens) { return output(torch::tanh(b(e(tokens)))); }
  torch::nn::Embedding e{nullptr};
  Linear b{nullptr};
  Output output{nullptr};
};
TORCH_MODULE(Tied);

TEST(Cases, B16TiedWeightsStayTied) {
  for_every_placement([](const World& world, const Placements& placements) {
    Tied net;
    auto sharded =
        fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = named({"e", "b", "output"})});
    const auto tokens = torch::arange(8);
    auto loss = torch::nn::functional::cross_entropy(net(tokens), tokens + 1);
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), 2.32617496511, 1e-6);
    EXPECT_NEAR(gradients_of(sharded)["e.weight"].norm().item<double>(), 0.196798984304, 1e-6);
    EXPECT_NEAR(sharded.grad_norm(), 0.276192108578, 1e-6);
    EXPECT_EQ(sharded.full_parameters().size(), 3U);
    torch::optim::SGD(sharded.parameters(), torch::optim::SGDOptions(0.1)).step();
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(net->e->weight.clone(), net->output->weight.clone()));
  });
}

struct BorrowedImpl : torch::nn::Module {
  BorrowedImpl()
      : l(register_module("l", Linear(6, 6))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})))),
        output(register_module("output", Linear(6, 3))) {
    set_common_values(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(norm(l(x)) * l->bias); }
  Linear l{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  Linear output{nullptr};
};
TORCH_MODULE(Borrowed);

TEST(Cases, B19ParameterUsedOutsideItsModule) {
  for_every_placement([](const World& world, const Placements& placements) {
    Borrowed net;
    auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = named({"l"})});
    auto loss = (net(input_rows(0, 0, 8, 6)) - target_rows(0, 0, 8, 3)).pow(2).mean();
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), 0.531706065809, 1e-6);
    EXPECT_NEAR(gradients_of(sharded)["l.bias"].norm().item<double>(), 0.0404447587453, 1e-6);
    EXPECT_NEAR(sharded.grad_norm(), 0.543786252841, 1e-6);
  });
}

struct TwiceImpl : torch::nn::Module {
  TwiceImpl() : inner(register_module("inner", Linear(6, 6))), output(register_module("output", Linear(6, 3))) {
    set_common_values(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::tanh(inner(torch::tanh(inner(x))))); }
  Linear inner{nullptr}, output{nullptr};
};
TORCH_MODULE(Twice);

TEST(Cases, B20AModuleUsedTwice) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const bool again : {false, true}) {
      Twice net;
      auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = named({"inner"})});
      const auto x = input_rows(0, 0, 8, 6);
      auto loss = ((again ? recompute(net, x) : net(x)) - target_rows(0, 0, 8, 3)).pow(2).mean();
      loss.backward();
      EXPECT_NEAR(loss.item<double>(), 0.782531267893, 1e-6);
      EXPECT_NEAR(sharded.grad_norm(), 0.972473157810, 1e-6);
      expect_all_sharded(sharded);
    }
  });
}

TEST(Cases, B20TwoForwardsBeforeOneBackward) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    (net_s_loss(net, world, 0) + net_s_loss(net, world, 1)).backward();
    EXPECT_NEAR(sharded.grad_norm(), 1.53316870714, 2e-6);
    expect_all_sharded(sharded);
  });
}

TEST(Cases, B20TwoRecomputedForwardsBeforeOneBackward) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    const auto loss = [&](int64_t s) {
      return recompute([&, s](const torch::Tensor& factor) { return net_s_loss(net, world, s) * factor; }, torch::ones({}));
    };
    (loss(0) + loss(1)).backward();
    EXPECT_NEAR(sharded.grad_norm(), 1.53316870714, 2e-6);
    expect_all_sharded(sharded);
  });
}

}  // namespace
}  // namespace tessera::test
