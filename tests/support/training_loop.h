#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/on_ranks.h"
#include "tests/support/sharded_helpers.h"

namespace tessera::test {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// Parameters of an unsharded module, and their gradients, by name, tied ones once.
NamedTensors parameters_of(const torch::nn::Module& module);
NamedTensors gradients_of(const torch::nn::Module& module);

/// Sparse gradients, which embeddings can make, become dense.
void make_gradients_dense(const torch::nn::Module& module);

/// The same names, defined alike, and elements that differ by at most 1e-12 (fp64) or 1e-6 of the largest of all.
void expect_close(const NamedTensors& got, const NamedTensors& wanted, const std::string& what);

/// A model and what is done with it: each rank computes `loss` of its own samples, and the mean over ranks counts.
template <class Net>
struct TrainingLoop {
  std::function<Net()> build;  ///< makes the same net each time
  std::function<torch::Tensor(Net& net, int64_t step, int rank)> loss;
  ShardOptions options = {};
  int64_t steps = 3;
  /// Called after each backward, before the step.
  std::function<void(Net& net, int64_t step)> then = {};
  /// Called on the sharded net alone, before each step's forward.
  std::function<void(Net& net, Sharded& sharded, int64_t step)> before = {};
};

template <class Net>
void train_as_unsharded(const TrainingLoop<Net>& loop, const World& world, const Placements& placements, bool ours) {
  Net net = loop.build(), plain = loop.build();
  auto options = loop.options;
  options.placements = placements;
  auto sharded = fully_shard(net, mesh_for(world, placements), options);
  std::optional<AdamW> adamw;
  std::unique_ptr<torch::optim::Optimizer> on_shards, alone;
  std::vector<torch::Tensor> all;
  for (const auto& [name, parameter] : parameters_of(*plain)) all.push_back(parameter);
  if (ours) {
    adamw.emplace(sharded, AdamWOptions{.lr = 0.02, .eps = 1e-3, .weight_decay = 0.05});
    alone = std::make_unique<torch::optim::AdamW>(all, torch::optim::AdamWOptions(0.02).eps(1e-3).weight_decay(0.05));
  } else {
    const auto sgd = torch::optim::SGDOptions(0.05).momentum(0.5);
    on_shards = std::make_unique<torch::optim::SGD>(sharded.parameters(), sgd);
    alone = std::make_unique<torch::optim::SGD>(all, sgd);
  }
  for (int64_t step = 0; step < loop.steps; ++step) {
    const std::string when = " of step " + std::to_string(step + 1);
    if (loop.before) loop.before(net, sharded, step);
    const auto loss = loop.loss(net, step, world.rank.value);
    loss.backward();
    for (int rank = 0; rank < world.size; ++rank) {
      const auto expected = loop.loss(plain, step, rank);
      (expected / world.size).backward();
      if (rank == world.rank.value)
        expect_close({{"loss", loss.detach()}}, {{"loss", expected.detach()}}, "the loss" + when);
    }
    expect_all_sharded(sharded);
    for (Net* each : {&net, &plain})
      if (loop.then) loop.then(*each, step);
    make_gradients_dense(*plain);
    expect_close(sharded.full_gradients(), gradients_of(*plain), "the gradient" + when);
    if (adamw)
      adamw->step();
    else
      on_shards->step();
    alone->step();
    sharded.zero_grad();
    alone->zero_grad();
  }
  expect_close(sharded.full_parameters(), parameters_of(*plain), "the parameter");
  if (testing::Test::HasFailure()) throw std::runtime_error("not the unsharded run");
}

/// Trains the same way sharded, in every placement, and not, with torch's SGD and with our AdamW; compares losses, gradients
/// and parameters.
template <class Net>
void expect_as_unsharded(const TrainingLoop<Net>& loop, std::initializer_list<int> ranks = {1, 2, 3}) {
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        for (const bool ours : {false, true}) train_as_unsharded(loop, world, placements, ours);
      },
      ranks);
}

}  // namespace tessera::test
