// Averages of a sharded model's parameters, and copies of it.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

constexpr double kDecay = 0.7;

/// A model under training, plainly, with its average: what the sharded one must be.
struct Plain {
  explicit Plain(torch::Dtype type) {
    net->to(type);
    for (const auto& item : net->named_parameters()) average[item.key()] = item.value().detach().clone();
  }
  void step(int64_t s) {
    net_s_loss(net, World{}, s, net->first->weight.scalar_type()).backward();
    optimizer.step();
    optimizer.zero_grad();
    for (const auto& item : net->named_parameters())
      average[item.key()] = kDecay * average[item.key()] + (1 - kDecay) * item.value().detach();
  }
  NetS net = common_net();
  std::map<std::string, Tensor> average;
  torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.1)};
};

void expect_values(const NamedTensors& got, const std::map<std::string, Tensor>& wanted, double tolerance) {
  EXPECT_EQ(got.size(), wanted.size());
  for (const auto& [name, value] : got) EXPECT_TRUE(torch::allclose(value, wanted.at(name), tolerance, tolerance)) << name;
}

std::map<std::string, Tensor> parameters_of(const NetS& net) {
  std::map<std::string, Tensor> values;
  for (const auto& item : net->named_parameters()) values[item.key()] = item.value().detach();
  return values;
}

TEST(Ema, IsTheUnshardedAverage) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const auto type : {torch::kDouble, torch::kFloat})
      for (const bool ours : {false, true}) {
        if (ours && type == torch::kFloat) continue;
        const double tolerance = type == torch::kDouble ? 1e-12 : 1e-6;
        Plain plain(type);
        auto net = common_net();
        net->to(type);
        auto options = net_s_options(placements);
        options.layouts = {{"*.weight", per_parameter(1)}};
        auto sharded = fully_shard(net, mesh_for(world, placements), options);
        torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
        Ema ema(sharded, kDecay);
        const auto step = [&](int64_t s) {
          net_s_loss(net, world, s, type).backward();
          optimizer.step();
          optimizer.zero_grad();
          ema.update();
          plain.step(s);
        };
        const auto evaluate = [&](NetS& of, const World& at) {
          const torch::NoGradGuard no_grad;
          return net_s_loss(of, at, 7, type).item<double>();
        };
        step(0);
        step(1);
        expect_values(ema.full(), plain.average, tolerance);
        ema.swap();
        EXPECT_TRUE(ema.swapped());
        expect_values(sharded.full_parameters(), plain.average, tolerance);
        NetS averaged;
        averaged->to(type);
        {
          const torch::NoGradGuard no_grad;
          for (auto& item : averaged->named_parameters()) item.value().copy_(plain.average[item.key()]);
        }
        EXPECT_NEAR(mean_over_ranks(sharded, evaluate(net, world)), evaluate(averaged, World{}), 10 * tolerance);
        ema.swap();
        expect_values(sharded.full_parameters(), parameters_of(plain.net), tolerance);
        step(2);  // goes on as if nothing had been
        step(3);
        expect_values(sharded.full_parameters(), parameters_of(plain.net), tolerance);
        expect_values(ema.full(), plain.average, tolerance);
        EXPECT_EQ(ema.updates(), 4);
        ema.copy_to_parameters();
        expect_values(sharded.full_parameters(), plain.average, tolerance);
        sharded.release();
        expect_all_sharded(sharded);
      }
  });
}

/// Of bf16 models the fp32 master parameters are averaged.
TEST(Ema, AveragesMasterParameters) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto options = net_s_options(placements);
    options.precision.working = torch::kBFloat16;
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    AdamW optimizer(sharded, {.lr = 0.01});
    Ema ema(sharded, 0.5);
    NamedTensors wanted;
    for (const auto& [name, shard] : sharded.named_parameters()) wanted.emplace_back(name, shard.detach().clone());
    for (int64_t s = 0; s < 3; ++s) {
      net_s_loss(net, world, s, torch::kBFloat16).backward();
      if (optimizer.step()) ema.update();
      optimizer.zero_grad();
      const auto shards = sharded.named_parameters();
      for (size_t i = 0; i < shards.size(); ++i) wanted[i].second = 0.5 * wanted[i].second + 0.5 * shards[i].second.detach();
    }
    for (size_t i = 0; i < wanted.size(); ++i)
      EXPECT_TRUE(torch::allclose(ema.local()[i].second, wanted[i].second, 1e-6, 1e-7)) << wanted[i].first;
    const auto averages = ema.full();
    ema.swap();
    const auto values = sharded.full_parameters();
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(averages[i].second.scalar_type(), torch::kFloat);
      EXPECT_TRUE(torch::equal(values[i].second, averages[i].second.to(torch::kBFloat16))) << values[i].first;
    }
  });
}

TEST(Ema, IsReadAndWrittenByName) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), other_net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    auto options = net_s_options(zero3());
    options.layouts = {{"*", block(3)}};
    auto other = fully_shard(other_net, Mesh(world), options);
    Ema ema(sharded, 0.5), copy(other, 0.5), same(sharded, 0.5);
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    net_s_loss(net, world, 0).backward();
    optimizer.step();
    ema.update();
    copy.load_full(ema.full(), ema.updates());
    same.load_local(ema.local(), ema.updates());
    EXPECT_EQ(copy.updates(), 1);
    const auto wanted = ema.full(), from_full = copy.full(), from_local = same.full();
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_TRUE(torch::equal(wanted[i].second, from_local[i].second)) << wanted[i].first;
      for (const auto& [name, value] : from_full)
        if (name == wanted[i].first) {
          EXPECT_TRUE(torch::equal(wanted[i].second, value)) << name;
        }
    }
    expect_words(refusal<ConfigError>([&] { copy.load_full({{"first.wait", torch::zeros({1})}}); }), {"'first.wait'"});
    expect_words(refusal<ConfigError>([&] {
                   copy.load_full({{"first.bias", torch::zeros({1})}});
                 }),
                 {"'first.bias'", "[5]"});
  });
}

TEST(Ema, MisuseIsAnError) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    AdamW optimizer(sharded, {});
    expect_words(refusal<ConfigError>([&] { Ema(sharded, 1.5); }), {"[0, 1]", "1.5"});
    Ema ema(sharded, 0.5);
    ema.swap();
    expect_words(refusal<GuardError>([&] { ema.update(); }), {"swap"});
    expect_words(refusal<GuardError>([&] { ema.copy_to_parameters(); }), {"swap"});
    net_s_loss(net, world, 0).backward();
    optimizer.step();
    optimizer.zero_grad();
    expect_words(refusal<GuardError>([&] { ema.swap(); }), {"step 1", "step 2"});
  });
}

// ---- copies ------------------------------------------------------------------------------------------------------------

struct NormedImpl : torch::nn::Module {
  NormedImpl() : norm(register_module("norm", torch::nn::BatchNorm1d(6))), net(register_module("net", NetS())) {}
  Tensor forward(const Tensor& x) { return net(norm(x)); }
  torch::nn::BatchNorm1d norm{nullptr};
  NetS net{nullptr};
};
TORCH_MODULE(Normed);

/// A copy in any placement and layout has the values and the buffers, with all their digits, and trains apart.
TEST(Copy, HasTheValuesAndTrainsApart) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        for (const auto& to : every_placement()) {
          torch::manual_seed(3);
          Normed net;
          auto sharded = fully_shard(
              net, mesh_for(world, placements),
              {.placements = placements, .precision = {.working = torch::kBFloat16, .buffers = torch::kBFloat16}});
          AdamW optimizer(sharded, {.lr = 0.01});
          net(input_rows(0, 0, 8, 6, torch::kBFloat16)).sum().backward();
          optimizer.step();
          optimizer.zero_grad();
          torch::manual_seed(4);
          Normed other;
          auto copy = fully_shard(other, mesh_for(world, to), {.placements = to, .units = units_named({"net"})});
          sharded.copy_to(copy);
          std::map<std::string, Tensor> masters;
          for (const auto& [name, shard] : sharded.named_parameters()) masters[name] = sharded.full_of(name, shard);
          const auto equals_masters = [&] {
            bool all = true;
            for (const auto& [name, value] : copy.full_parameters()) all &= torch::equal(value, masters.at(name));
            return all;
          };
          EXPECT_TRUE(equals_masters());
          EXPECT_TRUE(torch::equal(other->norm->running_mean, net->norm->running_mean.to(torch::kFloat)));
          EXPECT_EQ(other->norm->num_batches_tracked.item<int64_t>(), 1);
          net(input_rows(1, 0, 8, 6, torch::kBFloat16)).sum().backward();
          optimizer.step();
          optimizer.zero_grad();
          EXPECT_TRUE(equals_masters());
          torch::optim::SGD others(copy.parameters(), torch::optim::SGDOptions(0.1));
          other(input_rows(1, 0, 8, 6)).sum().backward();
          others.step();
          EXPECT_FALSE(equals_masters());
        }
      },
      {1, 2, 4});
}

TEST(Copy, WhatDiffersIsListed) {
  on_ranks(2, [](World world) {
    torch::manual_seed(0);
    Normed net;
    NetS other;
    auto sharded = fully_shard(net, Mesh(world), {});
    auto copy = fully_shard(other, Mesh(world), {.initial = Initial::broadcast});
    expect_words(refusal<ConfigError>([&] { sharded.copy_to(copy); }),
                 {"'net.first.weight' is missing in the copy", "'first.weight' is only in the copy",
                  "buffer 'norm.running_mean' is missing"});
  });
}

/// libtorch's own clone of a sharded module is a plain module with the whole values, which can be sharded in its turn.
TEST(Copy, CloneOfAModuleIsAPlainOne) {
  for_every_placement([](const World& world, const Placements& placements) {
    torch::manual_seed(0);
    torch::nn::Linear net(6, 5);
    auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements});
    auto clone = std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->clone());
    const auto values = sharded.full_parameters();
    EXPECT_TRUE(torch::equal(clone->weight, values[0].second));
    EXPECT_EQ(clone->weight.detach().const_data_ptr() != nullptr, true);
    auto copy = fully_shard(*clone, mesh_for(world, placements), {.placements = placements});
    EXPECT_TRUE(torch::equal(copy.full_parameters()[1].second, values[1].second));
  });
}

}  // namespace
}  // namespace tessera::test
