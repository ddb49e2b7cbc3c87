// Gradients that the user changes between backward and the step of our AdamW: the step takes what .grad of the shards holds,
// as torch::optim's does.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
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

}  // namespace
}  // namespace tessera::test
