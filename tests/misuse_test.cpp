// Uses whose numbers would be wrong without a word, or wrong on one rank alone.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

Tensor loss_of(NetS& net, const World& world, int64_t s = 0) { return net_s_loss(net, world, s); }

ShardOptions whole_matrices() { return {.units = named({"first", "middle"}), .layouts = {{"*", whole_parameters()}}}; }

// ---- optimizers ----------------------------------------------------------------------------------------------------------

TEST(Misuse, MuonBesideAdamW) {
  on_ranks(2, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), whole_matrices());
    Muon muon(sharded, {.type = torch::kFloat});
    AdamW all(sharded, {});
    expect_words(refusal<ConfigError>([&] { Muon(sharded, {}); }), {"AdamW", "other_parameters()"});
    loss_of(net, world).backward();
    const torch::NoGradGuard no_grad;  // what Muon does on the owner of a matrix
    expect_words(refusal<GuardError>([&] { sharded.parameters()[0].mul_(0.5); }), {"AdamW", "torch::optim"});
    all.step();
    sharded.parameters()[0].mul_(0.5);  // after the step it is an update as any
  });
}

TEST(Misuse, AnOptimizerThatHasTakenInGradientsThatAreNotFinite) {
  for (const auto policy : {NonFinite::stop, NonFinite::skip})
    for_every_placement(
        [&](const World& world, const Placements& placements) {
          auto net = common_net();
          auto options = net_s_options(placements);
          options.non_finite = policy;
          auto sharded = fully_shard(net, mesh_for(world, placements), options);
          torch::optim::Adam adam(sharded.parameters(), torch::optim::AdamOptions(0.01));
          (loss_of(net, world) * NAN).backward();
          if (policy == NonFinite::stop)
            expect_words(refusal<NonFiniteError>([&] { adam.step(); }), {"'first.weight'", "not finite"});
          else
            expect_words(refusal<GuardError>([&] { adam.step(); }), {"step 1", "Sharded::step"});
          sharded.zero_grad();
          loss_of(net, world).backward();
          expect_words(refusal<GuardError>([&] { adam.step(); }), {"step 1", "own state", "Sharded::step"});
          torch::optim::Adam anew(sharded.parameters(), torch::optim::AdamOptions(0.01));
          EXPECT_TRUE(sharded.step(anew));
          EXPECT_TRUE(std::isfinite(sums_of(sharded).sum));
        },
        {1, 2});
}

TEST(Misuse, LearningRatesOfOnesOwn) {
  for (const auto& placements : {ddp(), zero3()})
    on_ranks(2, [&](World world) {
      auto net = common_net();
      auto sharded = fully_shard(net, Mesh(world), net_s_options(placements));
      torch::optim::SGD optimizer(sharded.parameters(), 0.1 + 0.1 * world.rank.value);
      loss_of(net, world).backward();
      expect_words(refusal<AgreementError>([&] { sharded.step(optimizer); }), {"step 1", "learning rate"});
    });
}

TEST(Misuse, ReplicasThatDrift) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const bool ours : {true, false}) {
          auto net = common_net();
          auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
          std::optional<AdamW> adamw;
          if (ours) adamw.emplace(sharded, AdamWOptions{});
          torch::optim::SGD sgd(sharded.parameters(), 0.1);
          const bool replicas = sharded.engine().units()[0]->shares_sums();
          const auto step = [&](int64_t s) {
            loss_of(net, world, s).backward();
            sharded.grad_norm();
            for (auto& [name, shard] : sharded.named_parameters())
              if (name == "middle.bias" && shard.grad().defined()) shard.mutable_grad().mul_(1 - 2 * world.rank.value);
            ours ? void(adamw->step()) : void(sgd.step());
            sharded.zero_grad();
          };
          step(0);
          if (replicas)
            expect_words(refusal<AgreementError>([&] { step(1); }), {"step 2", "'middle.bias'", "between ranks 0 and"});
          else
            step(1);  // each part is one rank's own business
        }
      },
      {2});
}

TEST(Misuse, AnOptimizerThatFindsNoGradients) {
  on_ranks(1, [](World world) {
    auto net = common_net();
    torch::optim::SGD before(net->parameters(), 0.1);
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    testing::internal::CaptureStderr();
    for (int64_t s = 0; s < 4; ++s) {
      loss_of(net, world, s).backward();
      before.step();
      sharded.zero_grad();
    }
    const std::string said = testing::internal::GetCapturedStderr();
    expect_words(said, {"no optimizer has used any", "'first.weight'", "sharded.parameters()"});
    EXPECT_EQ(said.find("no optimizer"), said.rfind("no optimizer")) << "said once";
  });
}

// ---- graphs --------------------------------------------------------------------------------------------------------------

TEST(Misuse, BackwardThroughAGraphFromBeforeTheUpdate) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const int which : {0, 1, 2}) {
          auto net = common_net();
          auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
          std::optional<AdamW> ours;
          if (which < 2) ours.emplace(sharded, AdamWOptions{.fused_reduction = which == 1});
          torch::optim::Adam theirs(sharded.parameters(), torch::optim::AdamOptions(0.01));
          const auto step = [&] { ours ? void(ours->step()) : void(theirs.step()); };
          const Tensor loss = loss_of(net, world), old = loss_of(net, world, 1);
          loss.backward();
          step();
          sharded.zero_grad();
          sharded.full_parameters();
          expect_words(refusal<c10::Error>([&] { old.backward(); }), {"modified by an inplace operation"});
        }
      },
      {1, 2});
}

TEST(Misuse, RecomputedPartsInAPartialBackward) {
  on_ranks(2, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    const auto x = torch::ones({2, 6}).requires_grad_(true);
    const auto loss = [&] { return recompute([&](const Tensor& in) { return net(in); }, x).sum(); };
    expect_words(refusal<GuardError>([&] { torch::autograd::grad({loss()}, {x}); }),
                 {"tessera::recompute", "autograd::grad"});
    EXPECT_FALSE(sharded.grad_norm() > 0);
    expect_words(refusal<GuardError>([&] { loss().backward({}, {}, /*create_graph=*/true); }), {"create_graph"});
    expect_words(refusal<GuardError>([&] { loss().backward({}, {}, false, std::vector<Tensor>{x}); }), {"inputs"});
  });
}

TEST(Misuse, LooksAtAllGradientsInsideBackward) {
  const std::vector<std::function<void(Sharded&)>> looks = {
      [](Sharded& s) { s.clip_grad_norm(1); }, [](Sharded& s) { s.grad_norm(); }, [](Sharded& s) { s.clip_grad_value(1); },
      [](Sharded& s) { s.full_gradients(); }, [](Sharded& s) { s.zero_grad(); }};
  for (const auto& look : looks)
    on_ranks(2, [&](World world) {
      auto net = common_net();
      auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
      bool looked = false;
      net->middle->weight.register_hook([&](const Tensor&) {
        expect_words(refusal<GuardError>([&] { look(sharded); }), {"inside backward"});
        looked = true;
      });
      loss_of(net, world).backward();
      EXPECT_TRUE(looked);
    });
}

// ---- models --------------------------------------------------------------------------------------------------------------

TEST(Misuse, AParameterThatIsTransposedInPlace) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        {
          const torch::NoGradGuard no_grad;
          net->middle->weight.t_();
        }
        expect_words(refusal<GuardError>([&] { loss_of(net, world).backward(); }), {"'middle.weight'", "strides"});
      },
      {1, 2});
}

TEST(Misuse, UnderInferenceMode) {
  on_ranks(2, [](World world) {
    auto net = common_net();
    std::optional<Sharded> sharded;
    std::optional<Ema> average;
    {
      const c10::InferenceMode inference;
      sharded.emplace(fully_shard(net, Mesh(world), net_s_options(zero3())));
      average.emplace(*sharded, 0.9);
      NetS other;
      expect_words(refusal<ConfigError>([&] { fully_shard(other, Mesh(world)); }), {"'first.weight'", "InferenceMode"});
    }
    torch::optim::SGD optimizer(sharded->parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, *sharded, optimizer, world);
    average->update();
  });
}

TEST(Misuse, WhatOneRankFindsWrongEndsAllAtOnce) {
  on_ranks(
      2,
      [](World world) {
        auto net = common_net();
        ShardOptions options;
        if (world.rank == Rank(1)) options.layouts = {{"nothing.*", block(2)}};
        const auto shard = [&] { fully_shard(net, Mesh(world), options); };
        if (world.rank == Rank(1))
          expect_words(refusal<ConfigError>(shard), {"'nothing.*'"});
        else
          expect_words(refusal<AgreementError>(shard), {"rank 1", "'nothing.*'"});
        const auto again = fully_shard(net, Mesh(world));  // nothing is left behind
      },
      std::chrono::seconds(20));
}

}  // namespace
}  // namespace tessera::test
