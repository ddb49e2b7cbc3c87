// Published faults of sharded training, each with the numbers of the unsharded run (computed in fp64): numbers, ranks that
// differ, writes. Net S is the middle linear as a unit and the rest in the root.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"

namespace tessera::test {
namespace {

using torch::nn::Linear;
using torch::nn::LinearOptions;

TEST(Cases, NetSWithSgd) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
        expect_sgd_steps(net, sharded, optimizer, world);
      },
      {1, 2, 3, 4});
}

TEST(Cases, NetSInDoubleIsExact) {
  for_every_placement([](const World& world, const Placements& placements) {
    NetS net;
    net->to(torch::kDouble);
    set_common_values(*net);
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world, 1e-11);  // as many digits as the numbers have
  });
}

TEST(Cases, NetSWithAdamW) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const bool fused : {false, true}) {
      auto net = common_net();
      auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
      AdamW optimizer(sharded, {.lr = 0.05, .weight_decay = 0.01, .fused_reduction = fused});
      const double losses[] = {0.573100111651, 0.450210164873, 0.380128057020},
                   norms[] = {0.741135127809, 0.575792391337, 0.498418342716};
      for (int s = 0; s < 3; ++s) {
        auto loss = net_s_loss(net, world, s);
        loss.backward();
        EXPECT_NEAR(mean_over_ranks(sharded, loss.item<double>()), losses[s], 1e-6);
        if (!fused) {
          EXPECT_NEAR(sharded.grad_norm(), norms[s], 1e-6);
        }
        EXPECT_TRUE(optimizer.step());
        optimizer.zero_grad();
      }
      const Sums sums = sums_of(sharded);
      EXPECT_NEAR(sums.sum, -2.45825587205, 1e-5);
      EXPECT_NEAR(sums.absolute, 17.4837958412, 1e-5);
    }
  });
}

struct PairImpl : torch::nn::Module {
  PairImpl(bool bias = true)
      : a(register_module("a", Linear(LinearOptions(4, 4).bias(bias)))),
        b(register_module("b", Linear(LinearOptions(4, 4).bias(bias)))) {
    set_common_values(*this);
  }
  Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Pair);

TEST(Cases, B01RanksUseDifferentHalvesOfAUnit) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        Pair pair;
        auto sharded = fully_shard(pair, mesh_for(world, placements), {.placements = placements});
        const auto x = torch::full({2, 4}, world.rank.value + 1.0);
        auto loss = (world.rank.value == 0 ? pair->a(x) : pair->b(x)).pow(2).mean();
        loss.backward();
        EXPECT_NEAR(mean_over_ranks(sharded, loss.item<double>()), 1.64472627495, 1e-6);
        auto gradients = gradients_of(sharded);
        EXPECT_NEAR(gradients["a.weight"].norm().item<double>(), 0.896730397558, 1e-6);
        EXPECT_NEAR(gradients["a.bias"].norm().item<double>(), 0.448365198779, 1e-6);
        EXPECT_NEAR(gradients["b.weight"].norm().item<double>(), 3.15298407481, 1e-6);
        EXPECT_NEAR(gradients["b.bias"].norm().item<double>(), 0.788246018702, 1e-6);
      },
      {2});
}

TEST(Cases, B02UnusedParameterHasNoGradient) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const bool fused : {false, true}) {
      Pair pair;
      const auto before = pair->b->weight.detach().clone();
      auto sharded = fully_shard(pair, mesh_for(world, placements), {.placements = placements});
      AdamW optimizer(sharded, {.lr = 0.1, .weight_decay = 0.1, .fused_reduction = fused});
      for (int step = 0; step < 3; ++step) {
        pair->a(torch::ones({2, 4})).pow(2).mean().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      for (const auto& [name, value] : sharded.full_parameters()) {
        EXPECT_TRUE(name != "b.weight" || torch::equal(value, before));
      }
    }
  });
}

struct SkippingImpl : torch::nn::Module {
  SkippingImpl()
      : e0(register_module("e0", Linear(4, 4))),
        e1(register_module("e1", Linear(4, 4))),
        out(register_module("out", Linear(4, 4))) {
    set_common_values(*this);
  }
  torch::Tensor forward(torch::Tensor x, bool skip) {
    x = e0(x);
    if (!skip) x = e1(x);
    return out(x);
  }
  Linear e0{nullptr}, e1{nullptr}, out{nullptr};
};
TORCH_MODULE(Skipping);

TEST(Cases, B03ARankSkipsAUnit) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        Skipping net, plain;
        auto sharded =
            fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = named({"e0", "e1"})});
        const auto x = torch::ones({2, 4});
        net(x, world.rank.value == 1).pow(2).mean().backward();
        ((plain(x, false).pow(2).mean() + plain(x, true).pow(2).mean()) / 2).backward();
        auto gradients = gradients_of(sharded);
        for (const auto& item : plain->named_parameters())
          EXPECT_TRUE(torch::allclose(gradients[item.key()], item.value().grad(), 1e-6, 1e-7)) << item.key();
      },
      {2});
}

TEST(Cases, B04OptimizerBuiltAfterAForward) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements});
    net(input_rows(0, 0, 8, 6));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
  });
}

TEST(Cases, B05OptimizerOfThePlainParametersIsAnError) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    net_s_loss(net, world, 0).backward();
    optimizer.step();
    optimizer.zero_grad();
    try {
      net_s_loss(net, world, 1);
      FAIL() << "trained nothing, silently";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("sharded.parameters()"), std::string::npos) << error.what();
    }
  });
}

TEST(Cases, B06WritesToParametersAreKept) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    net(input_rows(0, 0, 8, 6));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.zero_();
    }
    sharded.release();
    for (const auto& [name, value] : sharded.full_parameters()) EXPECT_EQ(value.abs().sum().item<float>(), 0) << name;
    for (const auto& [name, shard] : sharded.named_parameters()) EXPECT_EQ(shard.abs().sum().item<float>(), 0) << name;
  });
}

TEST(Cases, B06WritesThatAreNotIdempotentCountOnce) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.mul_(3);
    const auto whole = sharded.full_parameters();
    const auto expected = plain->named_parameters();
    for (const auto& [name, value] : whole) EXPECT_TRUE(torch::equal(value, expected[name] * 3)) << name;
  });
}

TEST(Cases, B07RanksUseUnitsInDifferentOrder) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        Pair pair(false), plain(false);
        auto sharded =
            fully_shard(pair, mesh_for(world, placements), {.placements = placements, .units = named({"a", "b"})});
        const auto run = [](Pair& net, int rank) {
          return rank == 0 ? net->b(net->a(torch::eye(4))) : net->a(net->b(torch::eye(4)));
        };
        auto out = run(pair, world.rank.value);
        EXPECT_TRUE(torch::equal(out, run(plain, world.rank.value)));
        out.pow(2).mean().backward();
        ((run(plain, 0).pow(2).mean() + run(plain, 1).pow(2).mean()) / 2).backward();
        auto gradients = gradients_of(sharded);
        for (const auto& item : plain->named_parameters())
          EXPECT_TRUE(torch::allclose(gradients[item.key()], item.value().grad(), 1e-6, 1e-7)) << item.key();
      },
      {2});
}

TEST(Cases, B08DifferentInitialValues) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        torch::manual_seed(0);
        NetS first;
        torch::manual_seed(static_cast<uint64_t>(world.rank.value));
        NetS net;
        auto options = net_s_options(placements);
        try {
          fully_shard(net, mesh_for(world, placements), options);
          FAIL() << "a silent patchwork";
        } catch (const AgreementError& error) {
          EXPECT_NE(std::string(error.what()).find("first.weight"), std::string::npos) << error.what();
        }
        options.initial = Initial::broadcast;
        auto sharded = fully_shard(net, mesh_for(world, placements), options);
        const auto expected = first->named_parameters();
        for (const auto& [name, value] : sharded.full_parameters()) EXPECT_TRUE(torch::equal(value, expected[name])) << name;
      },
      {2, 3});
}

TEST(Cases, B09ClippingIsThatOfTheWholeModel) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    const double losses[] = {0.573100111651, 0.575291733895, 0.575656615675},
                 norms[] = {0.741135127809, 0.791104313745, 0.831108184395};
    for (int s = 0; s < 3; ++s) {
      auto loss = net_s_loss(net, world, s);
      loss.backward();
      EXPECT_NEAR(mean_over_ranks(sharded, loss.item<double>()), losses[s], 1e-6);
      EXPECT_NEAR(sharded.clip_grad_norm(0.05), norms[s], 1e-6);
      optimizer.step();
      optimizer.zero_grad();
    }
    const Sums sums = sums_of(sharded);
    EXPECT_NEAR(sums.sum, -0.505926067323, 1e-5);
    EXPECT_NEAR(sums.absolute, 15.8925892600, 1e-5);
  });
}

TEST(Cases, B10NonFiniteInputOnOneRank) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const auto policy : {NonFinite::stop, NonFinite::skip}) {
          auto net = common_net();
          auto options = net_s_options(placements);
          options.non_finite = policy;
          auto sharded = fully_shard(net, mesh_for(world, placements), options);
          AdamW optimizer(sharded, {.lr = 0.05});
          net_s_loss(net, world, 0).backward();
          optimizer.step();
          optimizer.zero_grad();
          const Sums before = sums_of(sharded);
          auto loss = net_s_loss(net, world, 1) * (world.rank.value == 1 ? NAN : 1.0);
          loss.backward();
          if (policy == NonFinite::stop) {
            try {
              optimizer.step();
              FAIL() << "went on with NaN";
            } catch (const NonFiniteError& error) {
              const std::string words = error.what();
              EXPECT_NE(words.find("step 2"), std::string::npos) << words;
              EXPECT_NE(words.find("parameter 'first.weight'"), std::string::npos) << words;
            }
          } else {
            EXPECT_FALSE(optimizer.step());
            optimizer.zero_grad();
            EXPECT_EQ(sharded.engine().skipped(), 1);
            const Sums after = sums_of(sharded);
            EXPECT_EQ(after.sum, before.sum);
            net_s_loss(net, world, 2).backward();
            EXPECT_TRUE(optimizer.step());
            EXPECT_NE(sums_of(sharded).sum, before.sum);
          }
        }
      },
      {2, 3});
}

TEST(Cases, B12MicroBatches) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const bool last_only : {false, true}) {
      auto net = common_net();
      auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
      for (int s = 0; s < 4; ++s) {
        if (s < 3 || !last_only) {
          const auto scope = sharded.accumulating();
          (net_s_loss(net, world, s) / 4).backward();
        } else {
          (net_s_loss(net, world, s) / 4).backward();
        }
      }
      EXPECT_NEAR(sharded.grad_norm(), 0.803953641918, 1e-6);
    }
  });
}

// Sharding over a mesh whose other axis has one rank changes nothing (B13's shard 1 is a single rank that keeps everything).
TEST(Cases, B13ReplicasStayEqual) {
  on_ranks(2, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world, {{"replicate", 2}, {"shard", 1}}), net_s_options(ddp()));
    net_s_loss(net, world, 0).backward();
    EXPECT_NEAR(sharded.grad_norm(), 0.741135127809, 1e-6);
    for (auto& [name, gradient] : gradients_of(sharded)) {
      const double mine = gradient.to(torch::kDouble).norm().item<double>();
      EXPECT_EQ(mean_over_ranks(sharded, mine), mine) << name;
    }
  });
}

TEST(Cases, B17InferenceBetweenSteps) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    {
      const c10::InferenceMode inference;
      net(input_rows(0, 0, 8, 6));
    }
    {
      const torch::NoGradGuard no_grad;
      net(input_rows(0, 0, 8, 6));
    }
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
  });
}

}  // namespace
}  // namespace tessera::test
