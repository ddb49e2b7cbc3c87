// Features used together: against the unsharded run.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tessera/base/text.h"
#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"

namespace tessera::test {
namespace {

using torch::Tensor;

NetS double_net() {
  auto net = common_net();
  net->to(torch::kDouble);
  return net;
}

Sharded shard(NetS& net, const World& world, const Placements& placements) {
  return fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = named({"first", "middle"})});
}

Tensor rows(int64_t s, int rank) { return input_rows(s, 4 * rank, 4 * rank + 4, 6, torch::kDouble); }

/// Samples of a rank, of all before it, and of all there are.
int64_t samples_of(int rank) { return 1 + 3 * rank; }
int64_t samples_before(int ranks) {
  int64_t all = 0;
  for (int r = 0; r < ranks; ++r) all += samples_of(r);
  return all;
}

void expect_gradients(const Sharded& sharded, const NetS& plain, const std::string& what) {
  const auto gradients = gradients_of(sharded);
  for (const auto& item : plain->named_parameters())
    EXPECT_LE((gradients.at(item.key()) - item.value().grad()).abs().max().item<double>(), 1e-12) << what << item.key();
}

void expect_parameters(const Sharded& sharded, const NetS& plain, const std::string& what) {
  const auto wanted = plain->named_parameters();
  for (const auto& [name, value] : sharded.full_parameters())
    EXPECT_LE((value - wanted[name]).abs().max().item<double>(), 1e-12) << what << name;
}

// ---- what is said of the next gradients, and torch::autograd::grad in forward --------------------------------------------

Tensor penalised(NetS& net, int rank) {
  const int64_t begin = samples_before(rank), end = begin + samples_of(rank);
  const auto x = input_rows(0, begin, end, 6, torch::kDouble).requires_grad_(true);
  const auto y = net(x);
  const auto slope = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
  return (y - target_rows(0, begin, end, 3, torch::kDouble)).pow(2).mean() + 0.1 * slope.pow(2).sum(1).mean();
}

TEST(MixedUses, WeightsOutliveAGradientPenaltyInForward) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        const auto all = static_cast<double>(samples_before(world.size));
        const auto count = static_cast<double>(samples_of(world.rank.value));
        for (const std::string how : {"weight_by ", "join_by "}) {
          auto net = double_net(), plain = double_net();
          auto sharded = shard(net, world, placements);
          if (how == "join_by ")
            sharded.join_by(count);
          else
            sharded.weight_by(count);
          penalised(net, world.rank.value).backward();
          for (int r = 0; r < world.size; ++r) (penalised(plain, r) * (static_cast<double>(samples_of(r)) / all)).backward();
          expect_gradients(sharded, plain, how);
        }
        auto net = double_net(), plain = double_net();
        auto sharded = shard(net, world, placements);
        sharded.join(world.rank == Rank(0), DivideBy::active_ranks);
        if (world.rank == Rank(0)) penalised(net, 0).backward();
        penalised(plain, 0).backward();
        expect_gradients(sharded, plain, "join ");
      },
      {1, 2, 3});
}

// ---- frozen between micro-batches ----------------------------------------------------------------------------------------

TEST(MixedUses, AUnitThatIsFrozenBetweenMicroBatchesKeepsItsGradients) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const bool fused : {false, true}) {
          auto net = double_net(), plain = double_net();
          auto sharded = shard(net, world, placements);
          AdamW optimizer(sharded, {.lr = 0.01, .eps = 1e-3, .weight_decay = 0.1, .fused_reduction = fused});
          torch::optim::AdamW expected(plain->parameters(), torch::optim::AdamWOptions(0.01).eps(1e-3).weight_decay(0.1));
          const auto freeze = [](NetS& model, bool frozen) {
            for (auto& parameter : model->middle->parameters()) parameter.set_requires_grad(!frozen);
          };
          for (int64_t s = 0; s < 3; ++s) {
            {
              const auto more = sharded.accumulating();
              net(rows(2 * s, world.rank.value)).pow(2).mean().backward();
            }
            freeze(net, true);
            net(rows(2 * s + 1, world.rank.value)).pow(2).mean().backward();
            for (int r = 0; r < world.size; ++r) (plain(rows(2 * s, r)).pow(2).mean() / world.size).backward();
            freeze(plain, true);
            for (int r = 0; r < world.size; ++r) (plain(rows(2 * s + 1, r)).pow(2).mean() / world.size).backward();
            if (!fused) expect_gradients(sharded, plain, text("fused ", fused, ", step ", s, ": "));
            optimizer.step();
            optimizer.zero_grad();
            expected.step();
            expected.zero_grad();
            freeze(net, false);
            freeze(plain, false);
          }
          expect_parameters(sharded, plain, text("fused ", fused, ": "));
        }
      },
      {1, 2});
}

// ---- parts used a different number of times on each rank -----------------------------------------------------------------

/// `repeats` uses of the middle layer, recomputed or not.
Tensor repeated(NetS& net, const Tensor& x, int repeats, bool recomputed) {
  Tensor y = torch::tanh(net->first(x));
  for (int i = 0; i < repeats; ++i) {
    auto part = [net](const Tensor& in) mutable { return torch::tanh(net->middle(in)); };
    y = recomputed ? recompute(part, y) : part(y);
  }
  return net->last(y).pow(2).mean();
}

TEST(MixedUses, APartMayBeRecomputedMoreOftenOnOneRankOnceAStepHasShownIt) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = double_net(), plain = double_net();
        auto sharded = shard(net, world, placements);
        torch::optim::SGD optimizer(sharded.parameters(), 0.1), expected(plain->parameters(), 0.1);
        const auto repeats = [](int64_t s, int rank) { return s == 0 ? 2 : 1 + static_cast<int>((s + rank) % 3); };
        for (int64_t s = 0; s < 4; ++s) {
          repeated(net, rows(s, world.rank.value), repeats(s, world.rank.value), true).backward();
          optimizer.step();
          optimizer.zero_grad();
          for (int r = 0; r < world.size; ++r) (repeated(plain, rows(s, r), repeats(s, r), false) / world.size).backward();
          expected.step();
          expected.zero_grad();
        }
        expect_parameters(sharded, plain, "");
      },
      {1, 2, 3});
}

// ---- norms ---------------------------------------------------------------------------------------------------------------

TEST(MixedUses, NormsOfAnyType) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const double type : {1.0, 2.0, 3.0, 0.5, std::numeric_limits<double>::infinity()}) {
      auto net = double_net(), plain = double_net();
      auto sharded = shard(net, world, placements);
      net(rows(0, world.rank.value)).pow(2).mean().backward();
      for (int r = 0; r < world.size; ++r) (plain(rows(0, r)).pow(2).mean() / world.size).backward();
      double wanted = 0;
      for (const auto& parameter : plain->parameters()) {
        const auto part = parameter.grad().abs();
        wanted =
            std::isinf(type) ? std::max(wanted, part.max().item<double>()) : wanted + part.pow(type).sum().item<double>();
      }
      if (!std::isinf(type)) wanted = std::pow(wanted, 1 / type);
      EXPECT_NEAR(sharded.grad_norm(type), wanted, 1e-10 * wanted) << type;
      EXPECT_NEAR(sharded.clip_grad_norm(wanted / 2, type), wanted, 1e-10 * wanted) << type;
      for (auto& parameter : plain->parameters()) parameter.mutable_grad().mul_(wanted / 2 / (wanted + 1e-6));
      expect_gradients(sharded, plain, text("norm ", type, ": "));
      EXPECT_NEAR(sharded.grad_norm(type), wanted / 2, 1e-4 * wanted) << type;
    }
  });
}

// ---- an optimizer of the caller's own
// --------------------------------------------------------------------------------------

struct NoOptions : torch::optim::OptimizerCloneableOptions<NoOptions> {};

/// Gradient descent whose options know no learning rate.
struct Descent : torch::optim::Optimizer {
  explicit Descent(const std::vector<Tensor>& parameters) : Optimizer(parameters, std::make_unique<NoOptions>()) {}
  Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.1);
    return {};
  }
};

TEST(MixedUses, AnOptimizerWithoutALearningRateIsStepped) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = double_net(), plain = double_net();
        auto sharded = shard(net, world, placements);
        Descent optimizer(sharded.parameters()), expected(plain->parameters());
        for (int64_t s = 0; s < 2; ++s) {
          net(rows(s, world.rank.value)).pow(2).mean().backward();
          EXPECT_TRUE(sharded.step(optimizer));
          optimizer.zero_grad();
          for (int r = 0; r < world.size; ++r) (plain(rows(s, r)).pow(2).mean() / world.size).backward();
          expected.step();
          expected.zero_grad();
        }
        expect_parameters(sharded, plain, "");
      },
      {1, 2});
}

}  // namespace
}  // namespace tessera::test
