// Published faults of sharded training, each with the numbers of the unsharded run (computed in fp64): what is done with
// gradients.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

TEST(Cases, B11RanksWithDifferentNumbersOfRows) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const int micro_batches : {1, 2}) {
          auto net = common_net();
          auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
          AdamW optimizer(sharded, {});  // keeps gradients of replicated placements on each rank until the last
          const int64_t begin = world.rank.value == 0 ? 0 : 2, end = world.rank.value == 0 ? 2 : 12;
          const auto loss = [&](int64_t first, int64_t last) {
            return (net(input_rows(0, first, last, 6)) - target_rows(0, first, last, 3)).pow(2).mean();
          };
          double weighted = 0;
          const int64_t middle = world.rank.value == 0 ? 1 : 5;  // of two micro-batches of unequal size
          for (int micro = 0; micro < micro_batches; ++micro) {
            const int64_t first = micro == 0 ? begin : middle, last = micro + 1 == micro_batches ? end : middle;
            std::optional<Sharded::Accumulating> held;
            if (micro + 1 < micro_batches) held.emplace(sharded.engine());
            const double factor = sharded.weight_by(static_cast<double>(last - first), micro_batches > 1 ? 12 : 0);
            auto part = loss(first, last);
            weighted += factor * part.item<double>();
            part.backward();
          }
          EXPECT_NEAR(mean_over_ranks(sharded, weighted), 0.516440806094, 1e-6);
          EXPECT_NEAR(sharded.grad_norm(), 0.517740358343, 1e-6);
        }
      },
      {2});
}

// Weights that are 1, or not given, among others; and gradients that are dropped.
TEST(Cases, B11WeightsOfMicroBatchesDoNotReachEachOther) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    AdamW optimizer(sharded, {});
    const World alone{};
    const double weights[] = {1, 0.25, 0, 3};  // 0: none given, which is 1
    for (const bool dropped : {true, false}) {
      for (int64_t micro = 0; micro < 4; ++micro) {
        std::optional<Sharded::Accumulating> held;
        if (micro < 3 || dropped) held.emplace(sharded.engine());
        if (weights[micro] != 0) sharded.weight_by(weights[micro], world.size);
        net_s_loss(net, world, micro).backward();
        if (!dropped) (net_s_loss(plain, alone, micro) * (weights[micro] == 0 ? 1 : weights[micro])).backward();
      }
      if (dropped) optimizer.zero_grad();
    }
    auto gradients = gradients_of(sharded);
    for (const auto& item : plain->named_parameters())
      EXPECT_TRUE(torch::allclose(gradients[item.key()], item.value().grad(), 1e-5, 1e-6)) << item.key();
  });
}

TEST(Cases, B11AMeanOfMeansIsTheDefault) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        const int64_t begin = world.rank.value == 0 ? 0 : 2, end = world.rank.value == 0 ? 2 : 12;
        auto loss = (net(input_rows(0, begin, end, 6)) - target_rows(0, begin, end, 3)).pow(2).mean();
        loss.backward();
        EXPECT_NEAR(sharded.grad_norm(), 0.414913516751, 1e-6);
        expect_words(refusal<ConfigError>([&] { sharded.weight_by(-1); }), {"not negative", "-1"});
        expect_words(refusal<ConfigError>([&] { sharded.weight_by(0); }), {"no rank has any sample"});
      },
      {2});
}

TEST(Cases, B15FrozenAtFirstThenUnfrozen) {
  for_every_placement([](const World& world, const Placements& placements) {
    const auto run = [&](bool sharded_run) {
      auto net = common_net();
      std::optional<Sharded> sharded;
      for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
      auto options = net_s_options(placements);
      options.precision.working = torch::kBFloat16;
      options.precision.gradient = torch::kFloat;
      if (sharded_run)
        sharded = fully_shard(net, mesh_for(world, placements), options);
      else
        net->to(torch::kBFloat16);
      const World& here = sharded_run ? world : World{};
      net_s_loss(net, here, 0, torch::kBFloat16);
      for (auto& parameter : net->parameters()) parameter.set_requires_grad(true);
      net_s_loss(net, here, 0, torch::kBFloat16).backward();
      if (sharded_run) return sharded->grad_norm();
      double squares = 0;
      for (const auto& parameter : net->parameters())
        squares += parameter.grad().to(torch::kDouble).pow(2).sum().item<double>();
      return std::sqrt(squares);
    };
    EXPECT_NEAR(run(true), run(false), 0.01);  // bf16 has three digits, and rows are summed in another order
    EXPECT_NEAR(run(true), 0.741135127809, 0.02);
  });
}

TEST(Cases, B18AGradientOfAGradient) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    const int64_t begin = 8 * world.rank.value / world.size, end = 8 * (world.rank.value + 1) / world.size;
    const auto x = input_rows(0, begin, end, 6).requires_grad_(true);
    const auto y = net(x);
    const auto g = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    const double rows = 8.0 / world.size;
    const auto error = (y - target_rows(0, begin, end, 3)).pow(2).sum() / (rows * 3);
    auto loss = error + 10 * g.pow(2).sum() * world.size;
    loss.backward();
    EXPECT_NEAR(mean_over_ranks(sharded, loss.item<double>()), 0.577431174767, 1e-6);
    EXPECT_NEAR(sharded.grad_norm(), 0.798991557677, 2e-6);
  });
}

TEST(Cases, B18BackwardTwiceOnOneGraph) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    auto loss = net_s_loss(net, world, 0);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    EXPECT_NEAR(sharded.grad_norm(), 1.48227025562, 2e-6);
  });
}

TEST(Cases, B30GradientsDividedByAnotherNumber) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto options = net_s_options(placements);
        options.gradient_divisor = 300;
        auto sharded = fully_shard(net, mesh_for(world, placements), options);
        net_s_loss(net, world, 0).backward();
        EXPECT_NEAR(sharded.grad_norm(), 0.00988180170413, 1e-8);
        options.gradient_divisor = 0;
        NetS other;
        expect_words(refusal<ConfigError>([&] { fully_shard(other, mesh_for(world, placements), options); }),
                     {"gradient_divisor", "positive"});
      },
      {4});
}

// Computed in fp32, summed over ranks in fp32, and kept in bf16: one rounding.
TEST(Cases, GradientsOfFp32KeptInBf16) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        if (placements.gradient == Placement::replicated) return;
        auto net = common_net(), plain = common_net();
        auto options = net_s_options(placements);
        options.precision.gradient = torch::kBFloat16;
        auto sharded = fully_shard(net, mesh_for(world, placements), options);
        net_s_loss(net, world, 0).backward();
        for (int rank = 0; rank < world.size; ++rank)
          net_s_loss(plain, World{.rank = Rank(rank), .size = world.size}, 0).backward();
        for (const auto& [name, gradient] : sharded.full_gradients()) {
          const auto mean = plain->named_parameters()[name].grad() / world.size;
          EXPECT_TRUE(torch::equal(gradient.to(torch::kFloat), mean.to(torch::kBFloat16).to(torch::kFloat))) << name;
        }
      },
      {1, 2, 4});
}

}  // namespace
}  // namespace tessera::test
