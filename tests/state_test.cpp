// Parameters that are written, loaded and replaced after sharding, and buffers.
#include <gtest/gtest.h>

#include <sstream>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

NetS other_net() {
  torch::manual_seed(5);
  return {};
}

NamedTensors values_of(NetS net) {
  NamedTensors values;
  for (const auto& item : net->named_parameters()) values.emplace_back(item.key(), item.value().detach().clone());
  return values;
}

void expect_values(const Sharded& sharded, const NamedTensors& expected) {
  std::map<std::string, Tensor> wanted(expected.begin(), expected.end());
  for (const auto& [name, value] : sharded.full_parameters()) EXPECT_TRUE(torch::equal(value, wanted.at(name))) << name;
}

/// Trains on, here and unsharded from `start`, and compares.
void expect_trains_on(const World& world, NetS& net, Sharded& sharded, NetS start) {
  torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1)),
      plain(start->parameters(), torch::optim::SGDOptions(0.1));
  const World alone{};
  for (int64_t s = 0; s < 2; ++s) {
    net_s_loss(net, world, s).backward();
    net_s_loss(start, alone, s).backward();
    for (auto* each : {&optimizer, &plain}) {
      each->step();
      each->zero_grad();
    }
  }
  auto expected = start->named_parameters();
  for (const auto& [name, value] : sharded.full_parameters())
    EXPECT_TRUE(torch::allclose(value, expected[name], 1e-5, 1e-6)) << name;
}

TEST(State, ParametersAreLoadedByName) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto options = net_s_options(placements);
    options.layouts = {{"*", per_parameter(1)}};
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    sharded.load_parameters(values_of(other_net()));
    expect_values(sharded, values_of(other_net()));
    expect_trains_on(world, net, sharded, other_net());
  });
}

TEST(State, LoadedValuesKeepTheirDigitsInTheMaster) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto options = net_s_options(placements);
    options.precision.working = torch::kBFloat16;
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    const auto values = values_of(other_net());
    sharded.load_parameters(values);
    std::map<std::string, Tensor> wanted(values.begin(), values.end());
    for (const auto& [name, value] : sharded.full_parameters())
      EXPECT_TRUE(torch::equal(value, wanted.at(name).to(torch::kBFloat16))) << name;
    for (const auto& [name, shard] : sharded.named_parameters())
      if (shard.sizes() == wanted.at(name).sizes()) {
        EXPECT_TRUE(torch::equal(shard, wanted.at(name))) << name;
      }
  });
}

TEST(State, WhatCannotBeLoadedIsListedAndNothingIsWritten) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    auto values = values_of(other_net());
    values[0].first = "first.weights";
    values[1].second = torch::zeros({7});
    const auto words = refusal<ConfigError>([&] { sharded.load_parameters(values); });
    expect_words(words, {"'first.weight' is missing", "'first.weights' is no parameter", "'first.bias'", "[7]", "[5]"});
    expect_values(sharded, values_of(common_net()));
    values.erase(values.begin(), values.begin() + 2);
    sharded.load_parameters(values, /*strict=*/false);
    auto expected = values_of(common_net());
    std::copy(values.begin(), values.end(), expected.begin() + 2);
    expect_values(sharded, expected);
  });
}

TEST(State, RanksThatWriteDifferentValuesAreTold) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        const auto fill = [&] {
          const torch::NoGradGuard no_grad;
          net->middle->bias.fill_(world.rank.value);
          sharded.release();
        };
        expect_words(refusal<AgreementError>(fill), {"'middle.bias'", "ranks 0 and 1"});
      },
      {2, 4});
  for_every_placement(
      [](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        auto values = values_of(common_net());
        values[3].second.add_(world.rank.value);
        expect_words(refusal<AgreementError>([&] { sharded.load_parameters(values); }), {"'middle.bias'", "ranks 0 and 1"});
      },
      {2});
}

// torch::load into the module, Module::to and set_data give parameters other memory.
TEST(State, ReplacedParametersAreAnErrorUntilAdopted) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    std::stringstream file;
    torch::save(other_net(), file);
    torch::load(net, file);
    expect_words(refusal<GuardError>([&] { sharded.full_parameters(); }), {"'first.weight'", "adopt()"});
    auto loss = net_s_loss(net, world, 0);
    expect_words(refusal<GuardError>([&] { loss.backward(); }), {"adopt()"});
  });
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    std::stringstream file;
    torch::save(other_net(), file);
    torch::load(net, file);
    sharded.adopt();
    expect_values(sharded, values_of(other_net()));
    expect_trains_on(world, net, sharded, other_net());
  });
}

TEST(State, OneReplacedParameterIsFoundWhenOthersAreUsed) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    net->last->bias.set_data(torch::zeros({3}));
    expect_words(refusal<GuardError>([&] { net_s_loss(net, world, 0); }), {"'last.bias'", "(root)"});
    net->last->bias.set_data(torch::zeros({3}, torch::kDouble));
    expect_words(refusal<ConfigError>([&] { sharded.adopt(); }), {"'last.bias'", "Double", "Float"});
  });
}

TEST(State, AModuleThatWasExchangedIsFound) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
    for (int64_t s = 0; s < 4; ++s) {
      net_s_loss(net, world, s).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto old = net->last;
    net->last = net->replace_module("last", torch::nn::Linear(old->options));
    // Looked for in every fourth step.
    expect_words(refusal<GuardError>([&] {
                   for (int64_t s = 0; s < 4; ++s) {
                     net_s_loss(net, world, 0).backward();
                     optimizer.step();
                     optimizer.zero_grad();
                   }
                 }),
                 {"'last.", "(root)", "another tensor"});
    net->last = net->replace_module("last", old);
    net_s_loss(net, world, 0).backward();
  });
}

TEST(State, AParameterThatWasAddedIsSaid) {
  on_ranks(1, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    net_s_loss(net, world, 0).backward();
    sharded.zero_grad();
    testing::internal::CaptureStderr();
    net->register_parameter("added", torch::zeros({2}));
    net_s_loss(net, world, 0).backward();
    sharded.zero_grad();
    net_s_loss(net, world, 0).backward();
    const std::string words = testing::internal::GetCapturedStderr();
    EXPECT_EQ(words.find("'added'"), words.rfind("'added'"));
    EXPECT_NE(words.find("'added' was added"), std::string::npos) << words;
  });
}

// ---- buffers ---------------------------------------------------------------------------------------------------------

struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : norm(register_module("norm", torch::nn::BatchNorm1d(6))),
        linear(register_module("linear", torch::nn::Linear(6, 3))) {}
  Tensor forward(const Tensor& x) { return linear(norm(x)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Normed);

/// The running mean that `rank`'s rows alone lead to.
Tensor own_mean(int rank) { return 0.1 * input_rows(0, 4 * rank, 4 * rank + 4, 6).mean(0); }

TEST(Buffers, AreKeptEqualAsThePolicySays) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const auto policy : {Buffers::average, Buffers::broadcast, Buffers::local}) {
          torch::manual_seed(0);
          Normed net;
          auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements, .buffers = policy});
          AdamW optimizer(sharded, {});
          net(input_rows(0, 4 * world.rank.value, 4 * world.rank.value + 4, 6)).sum().backward();
          optimizer.step();
          Tensor expected = own_mean(policy == Buffers::broadcast ? 0 : world.rank.value);
          if (policy == Buffers::average) expected = (own_mean(0) + own_mean(1)) / 2;
          EXPECT_TRUE(torch::allclose(net->norm->running_mean, expected, 1e-5, 1e-7)) << static_cast<int>(policy);
          EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 1);
        }
      },
      {2});
}

// Those are watched by samples of their contents, since batch_norm does not count up their versions.
TEST(Buffers, OfManyChannelsAreKeptEqualToo) {
  on_ranks(2, [](World world) {
    for (const int64_t channels : {16'384, 16'385, 100'000}) {
      torch::nn::BatchNorm1d net(channels);
      auto sharded = fully_shard(*net, Mesh(world));
      AdamW optimizer(sharded, {});
      const auto input = [&](int rank) {
        return torch::linspace(0, 1 + rank, 3).view({3, 1}) + torch::linspace(0, 1, channels);
      };
      net(input(world.rank.value)).sum().backward();
      optimizer.step();
      const Tensor expected = 0.1 * (input(0).mean(0) + input(1).mean(0)) / 2;
      EXPECT_TRUE(torch::allclose(net->running_mean, expected, 1e-5, 1e-6)) << channels;
    }
  });
}

TEST(Buffers, ThatDifferAtTheStartAreSaidAndDealtWithByThePolicy) {
  on_ranks(2, [](World world) {
    const auto mean_after = [&](Initial initial, Buffers policy, const std::string& said) {
      torch::manual_seed(0);
      Normed net;
      net->norm->running_mean.fill_(world.rank.value + 1);
      testing::internal::CaptureStderr();
      const auto sharded = fully_shard(net, Mesh(world), {.initial = initial, .buffers = policy});
      const std::string words = testing::internal::GetCapturedStderr();
      if (world.rank == Rank(0) && !said.empty())
        expect_words(words, {"'norm.running_mean' differs between ranks at the start", said});
      else
        EXPECT_EQ(words, "");
      return net->norm->running_mean[0].item<double>();
    };
    EXPECT_EQ(mean_after(Initial::verify, Buffers::average, "mean"), 1.5);
    EXPECT_EQ(mean_after(Initial::verify, Buffers::broadcast, "rank 0's"), 1);
    EXPECT_EQ(mean_after(Initial::verify, Buffers::local, "own"), world.rank.value + 1);
    EXPECT_EQ(mean_after(Initial::broadcast, Buffers::average, ""), 1);
  });
}

TEST(Buffers, OfOtherKindsAreAnErrorThatNamesThem) {
  on_ranks(2, [](World world) {
    for (const auto initial : {Initial::verify, Initial::broadcast}) {
      torch::nn::Linear net(2, 2);
      torch::manual_seed(0);
      net->reset_parameters();
      net->register_buffer("table", torch::zeros({world.rank.value + 3}));
      expect_words(refusal<AgreementError>([&] { fully_shard(*net, Mesh(world), {.initial = initial}); }),
                   {"'table'", "[3]", "[4]", "rank 1"});
      EXPECT_NO_THROW(fully_shard(*net, Mesh(world), {.initial = initial, .buffers = Buffers::local}));
    }
  });
}

}  // namespace
}  // namespace tessera::test
