// Units that are gathered, edited, prefetched and released by hand, and what stays gathered between forward and backward.
#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

std::map<std::string, Tensor> values_of(const Sharded& sharded) {
  std::map<std::string, Tensor> values;
  for (const auto& [name, value] : sharded.full_parameters()) values.emplace(name, value);
  return values;
}

void expect_values_of(const NetS& plain, const Sharded& sharded) {
  const auto values = values_of(sharded);
  for (const auto& item : plain->named_parameters())
    EXPECT_TRUE(torch::allclose(values.at(item.key()), item.value().detach(), 1e-5, 1e-6)) << item.key();
}

void step_both(torch::optim::Optimizer& one, torch::optim::Optimizer& other) {
  for (auto* each : {&one, &other}) {
    each->step();
    each->zero_grad();
  }
}

float* address_of(const Tensor& parameter) { return static_cast<float*>(parameter.unsafeGetTensorImpl()->mutable_data()); }

int count(const std::string& text, const std::string& word) {
  int found = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++found;
  return found;
}

// ---- gathered --------------------------------------------------------------------------------------------------------

TEST(Gathered, ParametersAreReadThroughTheirAddresses) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    {
      const auto scope = sharded.gathered("middle");
      const auto again = sharded.gathered();
      const Tensor wanted = plain->middle->weight.detach().contiguous();
      EXPECT_EQ(std::memcmp(address_of(net->middle->weight), wanted.data_ptr(), wanted.nbytes()), 0);
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(net_s_loss(net, world, 0).item<float>(), net_s_loss(plain, world, 0).item<float>());
    }
    expect_all_sharded(sharded);
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
  });
}

TEST(Gathered, WhatOperatorsWriteIsKept) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    {
      const auto scope = sharded.gathered();
      const torch::NoGradGuard no_grad;
      net->middle->weight.mul_(2);
    }
    EXPECT_TRUE(torch::equal(values_of(sharded).at("middle.weight"), plain->middle->weight.detach() * 2));
  });
}

TEST(Gathered, WritesPastOperatorsAreAnError) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        const auto write = [&] {
          const auto scope = sharded.gathered();
          sharded.engine().communicator().barrier("gathered");
          if (world.rank.value == 0) address_of(net->middle->bias)[0] = 7;
        };
        if (world.rank.value == 0)
          expect_words(refusal<GuardError>(write), {"'middle.bias'", "'middle'", "edit()"});
        else
          sharded.engine().communicator().barrier("gathered");
      },
      {1, 2});
}

TEST(Gathered, NoBackwardAndNoStepMeanwhile) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    net_s_loss(net, world, 0).backward();
    {
      const auto scope = sharded.gathered("middle");
      expect_words(refusal<GuardError>([&] { optimizer.step(); }), {"'middle'", "gathered()"});
    }
    sharded.zero_grad();
    {
      const auto scope = sharded.gathered("middle");
      expect_words(refusal<GuardError>([&] { net_s_loss(net, world, 0).backward(); }), {"backward", "'middle'"});
      expect_words(refusal<GuardError>([&] { sharded.edit("*", [] {}); }), {"'middle'", "another scope"});
    }
  });
}

TEST(Gathered, APatternThatMatchesNothingListsTheUnits) {
  on_ranks(1, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    expect_words(refusal<ConfigError>([&] { const auto scope = sharded.gathered("mid"); }), {"'mid'", "middle", "(root)"});
    expect_words(refusal<ConfigError>([&] { sharded.prefetch("mid"); }), {"'mid'", "middle", "(root)"});
  });
}

// ---- edit ------------------------------------------------------------------------------------------------------------

TEST(Edit, IsKeptHoweverItIsWritten) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    const auto change = [](NetS& each) {
      address_of(each->middle->weight)[3] = 0.25F;
      const torch::NoGradGuard no_grad;
      each->last->bias.add_(0.5);
      address_of(each->last->weight)[0] += 1;
    };
    change(plain);
    sharded.edit("*", [&] { change(net); });
    expect_all_sharded(sharded);
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1)),
        unsharded(plain->parameters(), torch::optim::SGDOptions(0.1));
    const World alone{};
    for (int64_t s = 0; s < 2; ++s) {
      net_s_loss(net, world, s).backward();
      net_s_loss(plain, alone, s).backward();
      step_both(optimizer, unsharded);
    }
    expect_values_of(plain, sharded);
  });
}

TEST(Edit, LeavesTheMasterDigitsOfWhatIsNotWritten) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto options = net_s_options(placements);
    options.precision.working = torch::kBFloat16;
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    sharded.edit("middle", [&] {
      const torch::NoGradGuard no_grad;
      net->middle->bias.fill_(3);
    });
    {  // the same by an operator outside of edit()
      const torch::NoGradGuard no_grad;
      net->last->bias.fill_(3);
      sharded.release();
    }
    auto wanted = plain->named_parameters();
    for (const auto& [name, shard] : sharded.named_parameters()) {
      if (name.ends_with("e.bias") || name == "last.bias") {
        EXPECT_TRUE(torch::equal(shard, torch::full_like(shard, 3))) << name;
      } else if (shard.sizes() == wanted[name].sizes()) {
        EXPECT_TRUE(torch::equal(shard, wanted[name])) << name;
      }
    }
  });
}

TEST(Edit, ThatThrowsIsDropped) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    const auto body = [&] {
      address_of(net->middle->weight)[3] = 0.25F;
      throw std::runtime_error("changed my mind");
    };
    expect_words(refusal<std::runtime_error>([&] { sharded.edit("middle", body); }), {"changed my mind"});
    expect_all_sharded(sharded);
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
  });
}

TEST(Edit, ThatDiffersBetweenRanksIsAnErrorAndNothingIsWritten) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        const auto body = [&] { address_of(net->middle->weight)[3] = static_cast<float>(world.rank.value); };
        expect_words(refusal<AgreementError>([&] { sharded.edit("middle", body); }), {"'middle.weight'", "ranks 0 and 1"});
        torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
        expect_sgd_steps(net, sharded, optimizer, world);
      },
      {2, 4});
}

// ---- prefetch --------------------------------------------------------------------------------------------------------

TEST(Prefetch, LeavesNothingToFetchAndChangesNoNumber) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    while (!sharded.prefetch()) {  // another rank may still be fetching what both use
    }
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
    sharded.release();
    while (!sharded.prefetch("middle")) {  // until the peers have published too
    }
    const auto values = values_of(sharded);
    for (int r = 0; r < world.size; ++r) sharded.engine().communicator().barrier("prefetched");
    EXPECT_EQ(values.size(), net->parameters().size());
  });
}

// ---- after forward ---------------------------------------------------------------------------------------------------

TEST(AfterForward, KeptUnitsAreGatheredOnceAStepWithTheSameNumbers) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto options = net_s_options(placements);
    options.reshard_after_forward = false;
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
    sharded.release();
    expect_all_sharded(sharded);
    const std::string schedule = sharded.schedule();
    EXPECT_EQ(count(schedule, "gather"), 2) << schedule;  // two units
    EXPECT_EQ(count(schedule, "backward  gather") + count(schedule, "backward gather"), 0) << schedule;
  });
}

TEST(AfterForward, UnitsAreKeptByName) {
  on_ranks(2, [](World world) {
    auto net = common_net();
    auto options = net_s_options(zero3());
    options.kept = {"(root)"};
    auto sharded = fully_shard(net, Mesh(world), options);
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
    EXPECT_EQ(sharded.engine().traffic().gathers, 3 * 3 + 2);  // the root once a step, the other twice; then the comparison
    options.kept = {"blocks.*"};
    auto other = common_net();
    expect_words(refusal<ConfigError>([&] { fully_shard(other, Mesh(world), options); }), {"'blocks.*'", "matches none"});
  });
}

TEST(AfterForward, KeptUnitsOfEvaluationAndAccumulation) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto options = net_s_options(placements);
    options.reshard_after_forward = false;
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1)),
        unsharded(plain->parameters(), torch::optim::SGDOptions(0.1));
    const World alone{};
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      EXPECT_NEAR(net_s_loss(net, alone, 9).item<float>(), net_s_loss(plain, alone, 9).item<float>(), 1e-5);
    };
    for (int64_t step = 0; step < 3; ++step) {
      evaluate();
      {
        const auto scope = sharded.accumulating();
        (net_s_loss(net, world, 2 * step) / 2).backward();
      }
      evaluate();
      const Tensor loss = net_s_loss(net, world, 2 * step + 1) / 2;
      evaluate();  // between forward and backward
      loss.backward();
      for (int64_t s : {2 * step, 2 * step + 1}) (net_s_loss(plain, alone, s) / 2).backward();
      step_both(optimizer, unsharded);
    }
    expect_values_of(plain, sharded);
  });
}

TEST(AfterForward, SmallParametersAreResident) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto options = net_s_options(placements);
    options.resident_below = 6;  // the biases
    options.layouts = {{"*.bias", per_parameter()}};
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
    const std::string schedule = sharded.schedule();
    if (placements.parameter == Placement::replicated) {
      EXPECT_EQ(count(schedule, "(resident)"), 0) << schedule;
      return;
    }
    EXPECT_EQ(count(schedule, "gather"), 2 * 2 + 1) << schedule;
    const auto& units = sharded.engine().units();
    const auto resident = std::find_if(units.begin(), units.end(), [](const auto& u) { return u->name() == "(resident)"; });
    ASSERT_NE(resident, units.end());
    EXPECT_EQ((*resident)->parameter_bytes().value, (*resident)->layout().total().value * 4);
    int64_t updated = 0;
    for (const auto& parameter : (*resident)->parameters()) updated += parameter.shard.numel();
    if ((*resident)->division().optimizer_parts() > 1) {
      EXPECT_LT(updated, (*resident)->layout().real().value);
    }
  });
}

TEST(AfterForward, TheSecondaryPartitionIsBitEqualToZero3) {
  on_ranks(4, [](World world) {
    const auto train = [&](const Mesh& mesh, const ReshardAfterForward& reshard, bool fused) {
      auto net = common_net();
      auto options = net_s_options(zero3());
      options.reshard_after_forward = reshard;
      auto sharded = fully_shard(net, mesh, options);
      AdamW optimizer(sharded, {.lr = 0.1, .fused_reduction = fused});
      for (int64_t s = 0; s < 3; ++s) {
        net_s_loss(net, world, s).backward();
        optimizer.step();
      }
      return values_of(sharded);
    };
    const Mesh grid(world, {{"node", 2}, {"local", 2}});
    for (const bool fused : {false, true}) {
      const auto plain = train(Mesh(world), true, fused);
      for (const char* axis : {"local", "node"})
        for (const auto& [name, value] : train(grid, axis, fused)) EXPECT_TRUE(torch::equal(value, plain.at(name))) << name;
    }
  });
}

TEST(AfterForward, TheSecondaryPartitionHoldsItsGroupsShare) {
  on_ranks(4, [](World world) {
    const auto bytes = [&](const Mesh& mesh, const ReshardAfterForward& reshard) {
      auto net = common_net();
      auto options = net_s_options(zero3());
      options.reshard_after_forward = reshard;
      return fully_shard(net, mesh, options).state_bytes(8);
    };
    const StateBytes plain = bytes(Mesh(world), true);
    const StateBytes secondary = bytes(Mesh(world, {{"node", 2}, {"local", 2}}), "local");
    EXPECT_NEAR(secondary.parameters, 2 * plain.parameters, 1e-6);
    EXPECT_NEAR(secondary.gradients, plain.gradients, 1e-6);
    EXPECT_NEAR(secondary.optimizer, plain.optimizer, 1e-6);
  });
}

TEST(AfterForward, ASecondaryPartitionNeedsZero3AndTwoAxes) {
  on_ranks(2, [](World world) {
    const auto attempt = [&](const Mesh& mesh, const Placements& placements, const char* axis) {
      auto net = common_net();
      auto options = net_s_options(placements);
      options.reshard_after_forward = axis;
      return refusal<ConfigError>([&] { fully_shard(net, mesh, options); });
    };
    const Mesh grid(world, {{"node", 1}, {"local", 2}});
    expect_words(attempt(grid, zero3(), "lokal"), {"'lokal'", "node 1 x local 2"});
    expect_words(attempt(grid, zero2(), "local"), {"zero2", "zero3"});
    expect_words(attempt(Mesh(world), zero3(), "data"), {"two axes", "data 2"});
  });
}

}  // namespace
}  // namespace tessera::test
