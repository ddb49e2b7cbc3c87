// The memory that training takes is what the layout says beforehand.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "tessera/storage/memory.h"
#include "tests/support/on_ranks.h"
#include "tests/support/sharded_helpers.h"

namespace tessera::test {
namespace {

using torch::Tensor;

constexpr int64_t kWidth = 768;
constexpr int kLayers = 24;

struct TowerImpl : torch::nn::Module {
  TowerImpl(int64_t width, int layers) {
    for (int i = 0; i < layers; ++i)
      register_module("layer" + std::to_string(i), torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
};
TORCH_MODULE(Tower);

struct Setting {
  bool recompute = false;
  bool reshard = true;
  torch::Dtype working = torch::kFloat;
};

/// Trains two steps; returns the most memory of this rank at the gradients of each layer and around steps.
int64_t peak_of_training(Tower& tower, Sharded& sharded, const Setting& setting, int64_t width) {
  int64_t most = 0;
  const auto look = [&] { most = std::max(most, memory_use().proportional.value); };
  AdamW optimizer(sharded, {.lr = 1e-3});
  for (int step = 0; step < 2; ++step) {
    Tensor x = torch::ones({2, width}, setting.working).requires_grad_(true);
    for (auto& layer : tower->children()) {
      const auto forward = [layer](const Tensor& input) {
        return torch::tanh(layer->as<torch::nn::Linear>()->forward(input));
      };
      x = setting.recompute ? recompute(forward, x) : forward(x);
      x.register_hook([look](const Tensor&) { look(); });
    }
    x.to(torch::kFloat).pow(2).mean().backward();
    look();
    optimizer.step();
    look();
    optimizer.zero_grad();
  }
  return most;
}

void expect_as_predicted(const World& world, const Placements& placements, const Setting& setting) {
  const auto run = [&](int64_t width, int layers, PeakBytes& predicted) {
    Tower tower = Tower(width, layers);
    tower->to(setting.working);
    ShardOptions options{.placements = placements, .units = units_of<torch::nn::LinearImpl>()};
    if (placements.parameter == Placement::sharded) options.reshard_after_forward = setting.reshard;
    auto sharded = fully_shard(tower, mesh_for(world, placements), options);
    return_freed_memory();
    const int64_t peak = peak_of_training(tower, sharded, setting, width);
    sharded.engine().communicator().barrier("measured");  // a rank that has left no longer has its part of what is shared
    predicted = sharded.predicted_peak(8);
    return peak;
  };
  torch::manual_seed(0);
  PeakBytes predicted;
  run(64, 2, predicted);  // what libtorch keeps from its first use
  return_freed_memory();
  const int64_t base = memory_use().proportional.value;
  const int64_t peak = run(kWidth, kLayers, predicted) - base;
  const auto wanted = static_cast<double>(predicted.total());
  EXPECT_NEAR(static_cast<double>(peak), wanted, 0.05 * wanted) << "of which in flight: " << predicted.in_flight;
}

TEST(Peak, IsWhatTheLayoutPredicts) {
  // Ranks that wait for a processor read late, and what they are to read stays longer: not more of them than cores.
  for_every_placement([](const World& world, const Placements& placements) { expect_as_predicted(world, placements, {}); },
                      {1, 2});
}

TEST(Peak, RecomputationAndWhatIsKeptAfterForwardChangeNothingOnOneHost) {
  for (const bool recompute : {true, false})
    for (const bool reshard : {true, false})
      on_ranks(2, [&](World world) { expect_as_predicted(world, zero3(), {.recompute = recompute, .reshard = reshard}); });
}

TEST(Peak, InSixteenBits) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        expect_as_predicted(world, placements, {.working = torch::kBFloat16});
      },
      {2});
}

}  // namespace
}  // namespace tessera::test
