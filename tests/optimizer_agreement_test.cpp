// Ranks that would train differently, and values that change between forward and backward, are told.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

TEST(OptimizerAgreement, DifferentLearningRates) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        AdamW optimizer(sharded, {.lr = 0.1 * (1 + world.rank.value)});
        net_s_loss(net, world, 0).backward();
        expect_words(refusal<AgreementError>([&] { optimizer.step(); }), {"step 1", "options", "learning rate"});
      },
      {2});
}

TEST(OptimizerAgreement, DifferentNormsToClipTo) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        net_s_loss(net, world, 0).backward();
        const double norm = world.rank.value == 0 ? 0.1 : 1e9;
        expect_words(refusal<AgreementError>([&] { sharded.clip_grad_norm(norm); }), {"step 1", "0.1", "1e+09"});
      },
      {2});
}

TEST(OptimizerAgreement, NormsThatCannotBe) {
  on_ranks(1, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    net_s_loss(net, world, 0).backward();
    expect_words(refusal<ConfigError>([&] { sharded.clip_grad_norm(-1); }), {"-1"});
    expect_words(refusal<ConfigError>([&] { sharded.clip_grad_norm(std::nan("")); }), {"nan"});
  });
}

TEST(OptimizerAgreement, DifferentParametersThatRequireAGradient) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        AdamW optimizer(sharded, {.lr = 0.1});
        if (world.rank.value == 0) net->middle->weight.set_requires_grad(false);
        net_s_loss(net, world, 0).backward();
        expect_words(refusal<AgreementError>([&] { optimizer.step(); }),
                     {"step 1", "'middle.weight'", "one on rank 1", "set_requires_grad"});
      },
      {2});
}

TEST(OptimizerAgreement, ValuesThatChangeBetweenForwardAndBackward) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    const auto values = sharded.full_parameters();
    auto loss = net_s_loss(net, world, 0);
    sharded.load_parameters(values);
    expect_words(refusal<c10::Error>([&] { loss.backward(); }), {"modified by an inplace operation"});
  });
}

TEST(OptimizerAgreement, TypesThatCannotBe) {
  on_ranks(1, [](World world) {
    const auto refuse = [&](const Precision& precision) {
      auto net = common_net();
      return refusal<ConfigError>([&] { fully_shard(net, Mesh(world), {.precision = precision}); });
    };
    expect_words(refuse({.working = torch::kInt}), {"precision.working", "Int"});
    expect_words(refuse({.working = torch::kFloat8_e5m2}), {"precision.working", "Float8"});
    expect_words(refuse({.gradient = torch::kInt}), {"precision.gradient", "Int"});
    expect_words(refuse({.gradient = torch::kDouble}), {"precision.gradient", "Double", "(root)"});
    expect_words(refuse({.buffers = torch::kInt}), {"precision.buffers", "Int"});
  });
}

}  // namespace
}  // namespace tessera::test
