// Steps take no more memory than the first ones, and it is given back when a phase ends: the peak of a second, smaller model
// in the same process is its own.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/on_ranks.h"
#include "tests/support/peak_memory.h"
#include "tests/support/sharded_helpers.h"

namespace tessera::test {
namespace {

constexpr int64_t kMebi = int64_t{1} << 20;

void train_some(const World& world, const Placements& placements, int64_t width, int layers) {
  torch::nn::Sequential model;
  for (int i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(width, width));
  auto sharded = fully_shard(model, mesh_for(world, placements),
                             {.placements = placements, .units = units_of<torch::nn::LinearImpl>()});
  AdamW optimizer(sharded, {.lr = 1e-3});
  for (int step = 0; step < 3; ++step) {
    model->forward(torch::ones({64, width})).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(MemoryReturn, ASecondSmallerModelHasItsOwnPeak) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        torch::manual_seed(0);
        train_some(world, placements, 64, 2);  // whatever libtorch keeps from its first use
        const Bytes base = memory_use().resident;
        train_some(world, placements, 1536, 8);  // 18.9 M parameters, 72 MiB each of weights, gradients and moments
        const Bytes large = peak_resident() - base;
        EXPECT_GT(large.value, 60 * kMebi);
        const Bytes after = memory_use().resident - base;
        EXPECT_LT(after.value, 24 * kMebi);
        forget_peak();
        train_some(world, placements, 256, 8);
        EXPECT_LT((peak_resident() - base).value, 64 * kMebi);
      },
      {2});
}

int64_t peak_of_training(const std::function<void(int64_t steps)>& train, int64_t steps) {
  forget_peak();
  train(steps);
  return peak_resident().value;
}

TEST(MemoryReturn, StepsTakeNoMoreThanTheFirstOnes) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        torch::manual_seed(0);
        torch::nn::Sequential model;
        for (int i = 0; i < 4; ++i) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(512, 512).bias(false)));
        auto sharded = fully_shard(model, mesh_for(world, placements),
                                   {.placements = placements, .units = units_of<torch::nn::LinearImpl>()});
        AdamW optimizer(sharded, {});
        const auto train = [&](int64_t steps) {
          for (int64_t step = 0; step < steps; ++step) {
            model->forward(torch::ones({4, 512})).pow(2).mean().backward();
            optimizer.step();
            optimizer.zero_grad();
          }
        };
        train(3);
        const int64_t before = memory_use().resident.value;
        const int64_t early = peak_of_training(train, 4), late = peak_of_training(train, 20);
        // Gradients of 1 MiB, of which a rank that is ahead of its peers has one or two more.
        EXPECT_LE(late - early, 3 * kMebi);
        EXPECT_LE(memory_use().resident.value - before, 3 * kMebi);
      },
      {1, 2});
}

}  // namespace
}  // namespace tessera::test
