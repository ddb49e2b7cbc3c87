// TorchScript models, as torch::jit::load returns them, against themselves unsharded.
#include <gtest/gtest.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/profiling_graph_executor_impl.h>
#include <torch/script.h>

#include <map>
#include <optional>
#include <sstream>

#include "tessera/base/text.h"
#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/test_folder.h"

namespace tessera::test {
namespace {

using torch::Tensor;
namespace jit = torch::jit;

constexpr auto kBlock = R"(
def forward(self, x, extra: bool):
    y = torch.tanh(torch.linear(x, self.weight, self.bias))
    if extra:
        y = y * self.gain
    if self.training:
        self.seen.add_(1)
    return x + y
)";

constexpr auto kNet = R"(
def forward(self, tokens):
    x = torch.embedding(self.table, tokens)
    for i in range(3):
        x = self.first.forward(x, i > 0)
        x = self.second.forward(x, True)
    x = torch.layer_norm(x, [6], self.norm_weight, self.norm_bias, 1e-5, False)
    return torch.linear(x, self.head)

def value(self, x):
    return torch.linear(x, self.table).sum()
)";

jit::Module block(const std::shared_ptr<jit::CompilationUnit>& code) {
  jit::Module module("Block", code, /*shouldMangle=*/true);
  module.register_parameter("weight", (torch::randn({6, 6}, torch::kDouble) * 0.3).requires_grad_(), false);
  module.register_parameter("bias", torch::randn({6}, torch::kDouble).requires_grad_(), false);
  module.register_parameter("gain", torch::randn({}, torch::kDouble).requires_grad_(), false);
  module.register_buffer("seen", torch::zeros({1}, torch::kDouble));
  module.register_attribute("training", c10::BoolType::get(), true);
  module.define(kBlock);
  return module;
}

// A file of a model with two blocks, an embedding table that is tied to the head, a frozen parameter and one that nothing
// uses.
std::string file() {
  torch::manual_seed(5);
  const auto code = std::make_shared<jit::CompilationUnit>();
  jit::Module net("Net", code);
  const auto table = torch::randn({7, 6}, torch::kDouble).requires_grad_();
  net.register_parameter("table", table, false);
  net.register_module("first", block(code));
  net.register_module("second", block(code));
  net.register_parameter("norm_weight", torch::ones({6}, torch::kDouble).requires_grad_(), false);
  net.register_parameter("norm_bias", torch::randn({6}, torch::kDouble), false);
  net.register_parameter("unused", torch::randn({3}, torch::kDouble).requires_grad_(), false);
  net.register_parameter("head", table, false);
  net.register_attribute("training", c10::BoolType::get(), true);
  net.define(kNet);
  std::ostringstream bytes;
  net.save(bytes);
  return bytes.str();
}

jit::Module loaded(const std::string& bytes) {
  std::istringstream stream(bytes);
  return jit::load(stream);
}

Tensor loss_of(jit::Module& net, int64_t step, int64_t begin, int64_t end) {
  const auto tokens = (torch::arange(8 * 5).view({8, 5}) * (step + 2) % 7).slice(0, begin, end);
  const auto scores = net.forward({tokens}).toTensor().slice(1, 0, 4).reshape({-1, 7});
  return torch::cross_entropy_loss(scores, tokens.slice(1, 1, 5).reshape({-1}));
}

void expect_equal(const std::string& name, const Tensor& got, const Tensor& wanted) {
  ASSERT_EQ(got.defined(), wanted.defined()) << name;
  if (got.defined()) {
    EXPECT_TRUE(torch::allclose(got, wanted, 1e-12, 1e-12)) << name << '\n' << got << wanted;
  }
}

std::vector<Tensor> trainable(const jit::Module& net) {
  std::vector<Tensor> all;
  for (const auto& item : net.named_parameters())
    if (item.value.requires_grad() && item.name != "head") all.push_back(item.value);  // which is the table again
  return all;
}

std::map<std::string, Tensor> tensors_of(const jit::Module& net) {
  std::map<std::string, Tensor> all;
  for (const auto& item : net.named_parameters()) all[item.name] = item.value;
  for (const auto& item : net.named_buffers()) all[item.name] = item.value;
  return all;
}

void train_both(const std::string& bytes, const World& world, const ShardOptions& options) {
  auto net = loaded(bytes), plain = loaded(bytes);
  auto sharded = fully_shard(net, mesh_for(world, options.placements), options);
  AdamW optimizer(sharded, {.lr = 0.05, .weight_decay = 0.1});
  torch::optim::AdamW reference(trainable(plain), torch::optim::AdamWOptions(0.05).weight_decay(0.1));
  const int64_t begin = 8 * world.rank.value / world.size, end = 8 * (world.rank.value + 1) / world.size;
  auto wanted = tensors_of(plain);
  for (int64_t step = 0; step < 5; ++step) {  // the executor specialises its code in the first two
    const auto loss = loss_of(net, step, begin, end), whole = loss_of(plain, step, 0, 8);
    loss.backward();
    whole.backward();
    EXPECT_NEAR(mean_over_ranks(sharded, loss.item<double>()), whole.item<double>(), 1e-12);
    for (const auto& [name, gradient] : gradients_of(sharded)) expect_equal(name, gradient, wanted.at(name).grad());
    optimizer.step();
    optimizer.zero_grad();
    reference.step();
    reference.zero_grad();
    net.train(step % 2 == 1);
    plain.train(step % 2 == 1);
    const torch::NoGradGuard no_grad;
    expect_equal("loss without gradients", loss_of(net, step, 0, 8), loss_of(plain, step, 0, 8));
    const auto x = torch::ones({2, 6}, torch::kDouble);
    expect_equal("another method", net.get_method("value")({x}).toTensor(), plain.get_method("value")({x}).toTensor());
  }
  sharded.release();
  expect_all_sharded(sharded);
  for (const auto& [name, value] : sharded.full_parameters()) expect_equal(name, value, wanted.at(name));
  for (const auto& item : net.named_buffers()) expect_equal(item.name, item.value, wanted.at(item.name));
}

TEST(ScriptModule, EqualsTheUnshardedRun) {
  const std::string bytes = file();
  for_every_placement([&](const World& world, const Placements& placements) {
    train_both(bytes, world, {.placements = placements, .units = units_of_type({"Block"})});
  });
}

TEST(ScriptModule, TakesValuesFromAFile) {
  const TestFolder folder;
  const std::string bytes = file();
  std::map<std::string, Tensor> wanted;
  for (const auto& [name, value] : tensors_of(loaded(bytes)))
    if (name != "table") wanted[name] = value.detach() * 2 + 1;  // which is the head again
  write_safetensors(folder.file("x"), wanted);
  for_every_placement([&](const World& world, const Placements& placements) {
    auto net = loaded(bytes);
    auto sharded =
        fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = units_of_type({"Block"})});
    load_at_once(sharded, folder.file("x"));
    const auto copy = net.deepcopy();
    for (const auto& [name, value] : tensors_of(copy))
      EXPECT_TRUE(torch::equal(value, wanted.at(name == "table" ? "head" : name)));
  });
}

TEST(ScriptModule, UnitsByNameAndSize) {
  const std::string bytes = file();
  on_ranks(2, [&](const World& world) {
    const auto names = [&](const UnitPolicy& policy) {
      auto net = loaded(bytes);
      std::vector<std::string> units;
      const auto sharded = fully_shard(net, Mesh(world), {.units = policy});
      for (const auto& unit : sharded.engine().units()) units.push_back(unit->name());
      return units;
    };
    using Names = std::vector<std::string>;
    EXPECT_EQ(names(nullptr), (Names{"(root)"}));
    EXPECT_EQ(names(units_named({"s*"})), (Names{"(root)", "second"}));
    EXPECT_EQ(names(units_of_size(43)), (Names{"(root)", "first", "second"}));
    EXPECT_EQ(names([](const Submodule& module) { return module.name == "first" && module.elements == 43; }),
              (Names{"(root)", "first"}));
    expect_words(refusal<ConfigError>([&] { names(units_of_size(44)); }), {"matches no module", "Net"});
    expect_words(refusal<ConfigError>([&] { names(units_of<torch::nn::LinearImpl>()); }),
                 {"'first' is a TorchScript module (Block)", "units_of_type"});
  });
}

// Each way in which libtorch can run the code, but for kernels made on the spot: those read memory without the dispatcher.
TEST(ScriptModule, EveryExecutor) {
  const std::string bytes = file();
  for (const bool profiling : {false, true})
    on_ranks(2, [&](const World& world) {
      jit::getExecutorMode() = profiling;
      jit::getProfilingMode() = profiling;
      train_both(bytes, world, {.units = units_named({"*"})});
    });
  on_ranks(2, [&](const World& world) {
    jit::setGraphExecutorOptimize(false);
    train_both(bytes, world, {.units = units_named({"*"})});
  });
}

TEST(ScriptModule, CopiesAreOrdinaryModels) {
  const std::string bytes = file();
  on_ranks(2, [&](const World& world) {
    auto net = loaded(bytes), plain = loaded(bytes);
    auto sharded = fully_shard(net, Mesh(world), {.units = units_of_type({"Block"})});
    auto copy = net.deepcopy();
    std::ostringstream saved, refused;
    copy.save(saved);
    expect_words(refusal<c10::Error>([&] { net.save(refused); }), {"unit 'first'", "sharded"});
    for (auto& parameter : sharded.parameters()) parameter.detach().zero_();
    auto again = loaded(saved.str());
    const torch::NoGradGuard no_grad;
    expect_equal("copy", loss_of(copy, 0, 0, 8), loss_of(plain, 0, 0, 8));
    expect_equal("saved copy", loss_of(again, 0, 0, 8), loss_of(plain, 0, 0, 8));
    EXPECT_FALSE(torch::equal(loss_of(net, 0, 0, 8), loss_of(plain, 0, 0, 8)));
  });
}

// What is frozen after it was sharded computes as any frozen model does; what was frozen before has nothing to shard.
TEST(ScriptModule, Frozen) {
  const std::string bytes = file();
  on_ranks(2, [&](const World& world) {
    auto net = loaded(bytes), plain = loaded(bytes);
    net.eval();
    plain.eval();
    std::optional<Sharded> sharded = fully_shard(net, Mesh(world), {.units = units_of_type({"Block"})});
    auto frozen = jit::freeze(net), frozen_plain = jit::freeze(plain);
    for (int pass = 0; pass < 4; ++pass) {
      if (pass == 2) {
        const torch::NoGradGuard no_grad;
        for (Tensor parameter : trainable(net)) parameter.mul_(2);
        for (Tensor parameter : trainable(plain)) parameter.mul_(2);
      }
      expect_equal(text("pass ", pass), loss_of(frozen, 0, 0, 8), loss_of(frozen_plain, 0, 0, 8));
    }
    expect_words(refusal<ConfigError>([&] { fully_shard(frozen, Mesh(world)); }),
                 {"(Net) has no parameters", "frozen TorchScript module", "before it was frozen"});
    sharded.reset();
    expect_words(refusal<std::exception>([&] { loss_of(frozen, 0, 0, 8); }), {"sharded"});
    expect_words(refusal<std::exception>([&] { loss_of(net, 0, 0, 8); }), {"sharded"});
  });
}

TEST(ScriptModule, Refusals) {
  const std::string bytes = file();
  on_ranks(2, [&](const World& world) {
    auto net = loaded(bytes);
    auto sharded = fully_shard(net, Mesh(world));
    expect_words(refusal<ConfigError>([&] { fully_shard(net, Mesh(world)); }),
                 {"parameter 'table' (unit '(root)') is sharded already"});
    const auto load_deferred = [&] {
      const Deferred scope;
      loaded(bytes);
    };
    expect_words(refusal<ConfigError>(load_deferred), {"tessera::Deferred", "Pause"});
    jit::overrideCanFuseOnCPU(true);
    jit::setTensorExprFuserEnabled(true);
    auto other = loaded(bytes);
    expect_words(refusal<ConfigError>([&] { fully_shard(other, Mesh(world)); }), {"(Net)", "overrideCanFuseOnCPU(false)"});
  });
}

}  // namespace
}  // namespace tessera::test
