// A model built under Deferred takes no memory, and no more than its shards and one unit while it is sharded.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/on_ranks.h"
#include "tests/support/peak_memory.h"
#include "tests/support/sharded_helpers.h"

namespace tessera::test {
namespace {

constexpr int64_t kMebi = int64_t{1} << 20;
constexpr int64_t kWidth = 2048;
constexpr int kLayers = 6;
constexpr int64_t kUnit = kWidth * kWidth * 4;  // bytes: 16 MiB
constexpr int64_t kSlack = 6 * kMebi;

torch::nn::Sequential stack_of(int64_t width, int layers) {
  torch::nn::Sequential model;
  for (int i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  return model;
}

ShardOptions options_for(const Placements& placements, Initial initial) {
  return {.placements = placements, .units = units_of<torch::nn::LinearImpl>(), .initial = initial};
}

// What this rank writes when it shards: its part of a copy of the parameters.
int64_t shards_of(const World& world, const Placements& placements) {
  return kLayers * kUnit / Division(placements, mesh_for(world, placements)).parameter_parts();
}

void warm_up(const World& world, const Placements& placements) {
  auto model = deferred([] { return stack_of(64, 2); });
  fully_shard(model, mesh_for(world, placements), options_for(placements, Initial::verify));
}

TEST(DeferredMemory, ShardingHoldsOneUnitAndTheShards) {
  for (const auto initial : {Initial::verify, Initial::broadcast})
    for_every_placement(
        [&](const World& world, const Placements& placements) {
          torch::manual_seed(0);
          warm_up(world, placements);
          torch::nn::Sequential model{nullptr};
          EXPECT_LT(peak_of([&] { model = deferred([] { return stack_of(kWidth, kLayers); }); }), kUnit + kSlack);
          EXPECT_LT(peak_of([] {}), kSlack);
          const int64_t peak =
              peak_of([&] { fully_shard(model, mesh_for(world, placements), options_for(placements, initial)); });
          EXPECT_LT(peak, shards_of(world, placements) + kUnit + kSlack + (initial == Initial::broadcast ? 8 * kMebi : 0));
          EXPECT_GT(peak, shards_of(world, placements));
        },
        {2});
}

// What construction at once takes, so that the bounds above say something.
TEST(DeferredMemory, ConstructionAtOnceHoldsAll) {
  on_ranks(2, [](World world) {
    torch::manual_seed(0);
    warm_up(world, zero3());
    const int64_t peak = peak_of([&] {
      auto model = stack_of(kWidth, kLayers);
      fully_shard(model, Mesh(world), options_for(zero3(), Initial::verify));
    });
    EXPECT_GT(peak, kLayers * kUnit);
  });
}

// Values that were copied into the model during construction go when their unit is sharded, although other tensors wait.
TEST(DeferredMemory, CopiedValuesGoWithTheirUnit) {
  on_ranks(1, [](World world) {
    warm_up(world, zero3());
    torch::Tensor waiting;
    const Bytes before = memory_use().resident;
    const auto model = deferred([&] {
      const torch::NoGradGuard no_grad;
      const auto source = [] {
        const Deferred::Pause pause;
        return torch::ones({kWidth, kWidth});
      }();
      auto built = stack_of(kWidth, 3);
      for (auto& weight : built->parameters()) weight.copy_(source);
      waiting = torch::ones({4});
      return built;
    });
    EXPECT_GT((memory_use().resident - before).value, 3 * kUnit);  // the copies
    materialize(model->parameters());
    EXPECT_LT((memory_use().resident - before).value, 3 * kUnit + kSlack);
    EXPECT_EQ(waiting.numel(), 4);
  });
}

// What operators leave on the way to a value is freed after its last use, as in construction.
TEST(DeferredMemory, TemporariesAreFreedWhileOperatorsRunAgain) {
  on_ranks(1, [](World world) {
    warm_up(world, zero3());
    torch::Tensor value;
    {
      const Deferred scope;
      value = torch::rand({kWidth, kWidth});
      for (int i = 0; i < 6; ++i) value = value * 0.9 + 0.1;
    }
    EXPECT_LT(peak_of([&] { materialize({&value, 1}); }), 3 * kUnit + kSlack);
  });
}

}  // namespace
}  // namespace tessera::test
