// Gradients that the user changes between backward and the step of our AdamW: the step takes what .grad of the shards holds,
// as torch::optim's does.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/refusal.h"
#include "tests/support/training_loop.h"

namespace tessera::test {
namespace {

using torch::Tensor;

/// What is done to the gradient of a parameter, or of a part of it.
using Change = std::function<void(Tensor& parameter)>;

void halve_in_place(Tensor& parameter) {
  if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
}
void halve_in_new_memory(Tensor& parameter) {
  if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad() * 0.5;
}
void drop(Tensor& parameter) { parameter.mutable_grad() = Tensor(); }

/// Steps of our AdamW here and of torch's there, with the gradients of the first and last parameter changed in between.
void expect_change_counts(const Change& change, const Precision& precision, torch::Dtype type) {
  for_every_placement([&](const World& world, const Placements& placements) {
    if (precision.gradient && placements.gradient == Placement::replicated) return;
    auto net = common_net(), plain = common_net();
    net->to(type);
    plain->to(precision.working ? torch::kFloat : type);
    auto options = net_s_options(placements);
    options.precision = precision;
    options.layouts = {{"*", whole_parameters()}};
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    AdamW ours(sharded, {.lr = 0.05, .eps = 1e-3});
    torch::optim::AdamW theirs(plain->parameters(), torch::optim::AdamWOptions(0.05).eps(1e-3));
    const auto working = precision.working.value_or(type);
    for (int64_t s = 0; s < 2; ++s) {
      const Tensor x = input_rows(s, 0, 8, 6, working);
      net(x).sum().backward();
      // The gradients that the sharded net has, so that only what is done with them can differ.
      for (const auto& [name, gradient] : sharded.full_gradients()) {
        auto parameter = plain->named_parameters()[name];
        parameter.mutable_grad() = gradient.to(parameter.scalar_type());
      }
      for (auto& [name, shard] : sharded.named_parameters())
        if (name == "first.weight" || name == "last.bias") change(shard);
      for (auto parameter : {plain->first->weight, plain->last->bias}) change(parameter);
      ours.step();
      theirs.step();
      ours.zero_grad();
      theirs.zero_grad();
    }
    for (auto& [name, value] : sharded.full_parameters()) {
      const auto expected = plain->named_parameters()[name].to(working);
      EXPECT_TRUE(torch::allclose(value, expected, precision.working ? 0.004 : 1e-6, 1e-7)) << name;
    }
  });
}

const Precision kPlain = {}, kBf16 = {.working = torch::kBFloat16},
                kBf16WithFp32Gradients = {.working = torch::kBFloat16, .gradient = torch::kFloat};

TEST(OptimizerGradients, ChangedInPlace) { expect_change_counts(halve_in_place, kPlain, torch::kDouble); }
TEST(OptimizerGradients, ChangedInPlaceInBf16) { expect_change_counts(halve_in_place, kBf16, torch::kFloat); }
TEST(OptimizerGradients, ChangedInPlaceInBf16WithFp32Gradients) {
  expect_change_counts(halve_in_place, kBf16WithFp32Gradients, torch::kFloat);
}
TEST(OptimizerGradients, Replaced) { expect_change_counts(halve_in_new_memory, kPlain, torch::kDouble); }
TEST(OptimizerGradients, ReplacedInBf16) { expect_change_counts(halve_in_new_memory, kBf16, torch::kFloat); }
TEST(OptimizerGradients, Dropped) { expect_change_counts(drop, kPlain, torch::kDouble); }
TEST(OptimizerGradients, DroppedInBf16) { expect_change_counts(drop, kBf16, torch::kFloat); }

// Norm and limit are those of what .grad holds, and the step takes what is there then; with torch's optimizers too.
void expect_changes_are_clipped(const Precision& precision, bool ours) {
  for_every_placement([&](const World& world, const Placements& placements) {
    if (precision.gradient && placements.gradient == Placement::replicated) return;
    auto net = common_net(), plain = common_net();
    auto options = net_s_options(placements);
    options.precision = precision;
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    std::optional<AdamW> adamw;
    if (ours) adamw.emplace(sharded, AdamWOptions{.lr = 0.05, .eps = 1e-3});
    const auto settings = torch::optim::AdamWOptions(0.05).eps(1e-3);
    torch::optim::AdamW theirs(sharded.parameters(), settings), alone(plain->parameters(), settings);
    const auto working = precision.working.value_or(torch::kFloat);
    for (int64_t s = 0; s < 2; ++s) {
      net(input_rows(s, 0, 8, 6, working)).sum().backward();
      for (const auto& [name, gradient] : sharded.full_gradients())
        plain->named_parameters()[name].mutable_grad() = gradient.to(torch::kFloat);
      auto shards = sharded.parameters(), whole = plain->parameters();
      for (auto* all : {&shards, &whole})
        for (auto& parameter : *all)
          if (parameter.grad().defined()) parameter.mutable_grad().mul_(8);
      const double norm = sharded.clip_grad_norm(3), expected = torch::nn::utils::clip_grad_norm_(whole, 3);
      EXPECT_NEAR(norm, expected, 1e-4 * expected);
      for (auto* all : {&shards, &whole})
        for (auto& parameter : *all)
          if (parameter.grad().defined()) parameter.mutable_grad().mul_(1.5);
      sharded.clip_grad_value(0.5);
      torch::nn::utils::clip_grad_value_(whole, 0.5);
      if (ours)
        adamw->step();
      else
        theirs.step();
      alone.step();
      sharded.zero_grad();
      alone.zero_grad();
    }
    for (auto& [name, value] : sharded.full_parameters()) {
      const auto wanted = plain->named_parameters()[name].to(working);
      EXPECT_TRUE(torch::allclose(value, wanted, precision.working ? 0.004 : 1e-6, 1e-6)) << name;
    }
  });
}

TEST(OptimizerGradients, ChangesAreClipped) {
  for (const bool ours : {false, true})
    for (const auto& precision : {kPlain, kBf16, kBf16WithFp32Gradients}) expect_changes_are_clipped(precision, ours);
}

// ---- a rank whose backward brings nothing --------------------------------------------------------------------------------

Tensor loss_or_nothing(NetS& net, int64_t step, int rank) {
  const Tensor x = input_rows(step, 4 * rank, 4 * rank + 4, 6, torch::kDouble);
  return step == 1 && rank == 1 ? x.requires_grad_(true).sum() : net(x).pow(2).mean();
}

NetS net_of_doubles() {
  auto net = common_net();
  net->to(torch::kDouble);
  return net;
}

TEST(OptimizerGradients, ARankWithoutAnyTakesPartInShardedStep) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = net_of_doubles(), plain = net_of_doubles();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        const auto options = torch::optim::SGDOptions(0.05).momentum(0.5);
        torch::optim::SGD optimizer(sharded.parameters(), options), alone(plain->parameters(), options);
        for (int64_t step = 0; step < 4; ++step) {
          loss_or_nothing(net, step, world.rank.value).backward();
          for (int rank = 0; rank < world.size; ++rank) (loss_or_nothing(plain, step, rank) / world.size).backward();
          sharded.step(optimizer);
          optimizer.zero_grad();
          alone.step();
          alone.zero_grad();
        }
        for (auto& [name, value] : sharded.full_parameters())
          EXPECT_TRUE(torch::allclose(value, plain->named_parameters()[name], 1e-12, 1e-12)) << name;
      },
      {2, 3});
}

TEST(OptimizerGradients, ARankWithoutAnyThatStepsByItselfIsRefusedOnAllRanks) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = net_of_doubles();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.05));
        const auto train = [&] {
          for (int64_t step = 0; step < 4; ++step) {
            loss_or_nothing(net, step, world.rank.value).backward();
            optimizer.step();
            optimizer.zero_grad();
          }
        };
        expect_words(refusal<AgreementError>(train), {"step 2", "rank 1", "Sharded::step(optimizer)"});
      },
      {2, 3});
}

}  // namespace
}  // namespace tessera::test
