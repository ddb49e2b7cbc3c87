// Uses of sharded models that can't be right: an error that names what and says what to do, never a wrong number.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/tessera.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/sharded_helpers.h"
#include "tests/support/stack.h"

namespace tessera::test {
namespace {

using torch::Tensor;

World alone() { return {.run = "alone"}; }

// ---- reading where nothing is
// -----------------------------------------------------------------------------------------------

TEST(Guard, ReadingAShardedParametersMemoryIsAnError) {
  for_every_placement([](const World& world, const Placements& placements) {
    Stack net;
    auto sharded = fully_shard(net, mesh_for(world, placements), stack_options(placements));
    const Tensor weight = net->layers[1]->weight;
    const auto expect_guarded = [&](auto&& read) {
      expect_words(refusal<c10::Error>(read), {"unit 'b1'", "Sharded::full_parameters()"});
    };
    const auto read_all = [&] {
      expect_guarded([&] { weight.data_ptr<float>(); });
      expect_guarded([&] { weight.mutable_data_ptr(); });
      expect_guarded([&] { weight.const_data_ptr<float>(); });
      expect_guarded([&] { weight.accessor<float, 2>(); });
      expect_guarded([&] { weight.t()[2].data_ptr(); });
      expect_guarded([&] {
        const c10::impl::ExcludeDispatchKeyGuard unobserved(c10::DispatchKey::Fake);
        const torch::NoGradGuard no_grad;
        weight.sum().item<float>();
      });
      expect_guarded([&] {
        std::ostringstream file;
        torch::save(weight, file);
      });
    };
    read_all();
    net->forward(torch::ones({1, 8})).sum().backward();
    sharded.zero_grad();
    sharded.release();
    read_all();
  });
}

TEST(Guard, OperatorsOnAParameterAreRight) {
  for_every_placement([](const World& world, const Placements& placements) {
    Stack net, plain;
    auto sharded = fully_shard(net, mesh_for(world, placements), stack_options(placements));
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < net->layers.size(); ++i) {
      const Tensor &mine = net->layers[i]->weight, &wanted = plain->layers[i]->weight;
      EXPECT_EQ(mine[3][5].item<float>(), wanted[3][5].item<float>());
      EXPECT_EQ(mine.sum().item<float>(), wanted.sum().item<float>());
      EXPECT_TRUE(torch::equal(mine.t().contiguous(), wanted.t().contiguous()));
      EXPECT_TRUE(torch::equal(mine, wanted));
      EXPECT_EQ(mine.sizes(), wanted.sizes());
    }
  });
}

TEST(Guard, WritesToShardsReachTheParameters) {
  for (const auto type : {torch::kFloat, torch::kBFloat16})
    for_every_placement([&](const World& world, const Placements& placements) {
      Stack net, plain;
      plain->to(type);
      auto options = stack_options(placements);
      options.precision.working = type;
      auto sharded = fully_shard(net, mesh_for(world, placements), options);
      const torch::NoGradGuard no_grad;
      for (auto& shard : sharded.parameters()) shard.mul_(2);
      const auto wanted = plain->named_parameters();
      for (const auto& [name, value] : sharded.full_parameters()) EXPECT_TRUE(torch::equal(value, wanted[name] * 2)) << name;
    });
}

TEST(Guard, ParametersOfADestroyedModelAreGuarded) {
  on_ranks(2, [](World world) {
    Stack net;
    { const auto sharded = fully_shard(net, Mesh(world), stack_options(zero3())); }
    for (const auto& use : std::vector<std::function<void()>>{[&] {
                                                                net->forward(torch::ones({1, 8}));
                                                              },
                                                              [&] { net->layers[0]->weight.data_ptr<float>(); }})
      expect_words(refusal<c10::Error>(use), {"unit 'b0'", "the sharded model that owned them is gone"});
    expect_words(refusal<ConfigError>([&] { fully_shard(net, Mesh(world), stack_options(zero3())); }),
                 {"'b0.weight'", "sharded already"});
  });
}

TEST(Guard, ShardsOutliveTheModelGuarded) {
  on_ranks(2, [](World world) {
    std::vector<Tensor> shards;
    {
      Stack net;
      shards = fully_shard(net, Mesh(world), stack_options(zero3())).parameters();
    }
    for (const auto& shard : shards)
      if (shard.numel() > 0)
        expect_words(refusal<c10::Error>([&] { shard.sum(); }), {"the shard of parameter 'b", "is gone"});
  });
}

// ---- models that can't be sharded
// ---------------------------------------------------------------------------------------------

TEST(Guard, ShardingTwice) {
  on_ranks(2, [](World world) {
    Stack net;
    const auto sharded = fully_shard(net, Mesh(world), stack_options(zero3()));
    expect_words(refusal<ConfigError>([&] { fully_shard(net, Mesh(world)); }), {"'b0.weight'", "sharded already", "once"});
    net->forward(torch::ones({1, 8})).sum().backward();  // and the first still works
  });
}

/// A module with the parameters that a test gives it.
struct Holder : torch::nn::Module {
  explicit Holder(const std::vector<std::pair<std::string, Tensor>>& parameters) : torch::nn::Module("Holder") {
    for (const auto& [name, value] : parameters)
      register_parameter(name, value, value.is_floating_point() || value.is_complex());
  }
};

std::string refused(const std::vector<std::pair<std::string, Tensor>>& parameters) {
  Holder module(parameters);
  return refusal<ConfigError>([&] { fully_shard(module, Mesh(alone())); });
}

TEST(Guard, ModelsThatCannotBeSharded) {
  on_ranks(1, [](World) {
    expect_words(refused({}), {"Holder", "no parameters"});
    const auto shared = torch::zeros({6});
    expect_words(refused({{"first", shared}, {"second", shared.detach().view({2, 3})}}),
                 {"'first'", "'second'", "the same memory", "tie"});
    expect_words(refused({{"wave", torch::zeros({3}, torch::kComplexHalf)}}), {"'wave'", "ComplexHalf"});
    expect_words(refused({{"spread", torch::zeros({3, 3}).to_sparse()}}), {"'spread'", "not dense"});
    expect_words(refused({{"nowhere", torch::empty({3}, torch::kMeta)}}), {"'nowhere'", "meta"});
  });
}

TEST(Guard, APolicyThatMatchesNothing) {
  on_ranks(1, [](World) {
    Stack net;
    ShardOptions options{.units = units_of<torch::nn::Conv2dImpl>()};
    expect_words(refusal<ConfigError>([&] { fully_shard(net, Mesh(alone()), options); }),
                 {"policy matches no module", "Stack"});
  });
}

TEST(Guard, AMeshOfTwoAxesDoesNotSayWhatToShardOver) {
  on_ranks(4, [](World world) {
    Stack net;
    const Mesh mesh(world, {{"replicate", 2}, {"shard", 2}});
    expect_words(refusal<ConfigError>([&] { fully_shard(net, mesh, stack_options(zero3())); }),
                 {"zero3", "'replicate' (2), 'shard' (2)", "hybrid("});
    fully_shard(net, mesh, stack_options(ddp()));  // replicated over all of it
  });
}

TEST(Guard, AnArenaBoundThatIsNoSize) {
  for (const char* wrong : {"0", "-5", "4G"})
    on_ranks(1, [&](World world) {
      setenv("TESSERA_ARENA_BOUND_BYTES", wrong, 1);
      Stack net;
      expect_words(refusal<ConfigError>([&] { fully_shard(net, Mesh(world)); }), {"TESSERA_ARENA_BOUND_BYTES", wrong});
    });
}

TEST(Guard, PlacementsAndTypesThatCannotBe) {
  on_ranks(1, [](World) {
    Stack net;
    expect_words(
        refusal<ConfigError>([&] { fully_shard(net, Mesh(alone()), {.placements = {.parameter = Placement::sharded}}); }),
        {"parameter=sharded"});
    for (const auto& placements : {ddp(), zero3()})
      expect_words(refusal<ConfigError>([&] {
                     fully_shard(
                         net, Mesh(alone()),
                         {.placements = placements, .precision = {.working = torch::kBFloat16, .gradient = torch::kDouble}});
                   }),
                   {"precision.gradient", "Double", "(root)", "Float"});
    // Nothing of it has touched the model.
    EXPECT_NO_THROW(net->layers[0]->weight.data_ptr<float>());
  });
}

TEST(Guard, AModelWithAParameterThatIsNoFloatIsRight) {
  on_ranks(2, [](World world) {
    Holder module({{"table", torch::arange(9)}, {"weight", torch::ones({9})}});
    const auto sharded = fully_shard(module, Mesh(world));
    for (const auto& [name, value] : sharded.full_parameters())
      EXPECT_TRUE(torch::equal(value, name == "table" ? torch::arange(9) : torch::ones({9}))) << name;
  });
}

// ---- optimizers
// -------------------------------------------------------------------------------------------------------------

TEST(Guard, WhatAFusedOptimizerCannotDo) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        Stack net;
        auto sharded = fully_shard(net, mesh_for(world, placements), stack_options(placements));
        AdamW optimizer(sharded, {.fused_reduction = true});
        stack_loss(net, world.rank.value).backward();
        expect_words(refusal<ConfigError>([&] { sharded.clip_grad_norm(1.0); }), {"norm", "fused_reduction"});
        expect_words(refusal<ConfigError>([&] { sharded.grad_norm(); }), {"norm", "fused_reduction"});
        if (placements.gradient == Placement::sharded)
          expect_words(refusal<ConfigError>([&] { sharded.full_gradients(); }),
                       {"gradients are not kept", "fused_reduction"});
        optimizer.step();
      },
      {1, 2});
}

TEST(Guard, AFusedOptimizerCannotSkip) {
  on_ranks(1, [](World) {
    Stack net;
    auto options = stack_options(zero3());
    options.non_finite = NonFinite::skip;
    const auto sharded = fully_shard(net, Mesh(alone()), options);
    expect_words(refusal<ConfigError>([&] { AdamW(sharded, {.fused_reduction = true}); }), {"skip", "fused_reduction"});
    EXPECT_NO_THROW(AdamW(sharded, {}));
  });
}

TEST(Guard, OptionsOfAdamW) {
  on_ranks(1, [](World) {
    Stack net;
    const auto sharded = fully_shard(net, Mesh(alone()), stack_options(zero3()));
    const auto refused = [&](const AdamWOptions& options) { return refusal<ConfigError>([&] { AdamW(sharded, options); }); };
    expect_words(refused({.lr = -1}), {"lr", "-1"});
    expect_words(refused({.lr = NAN}), {"lr", "nan"});
    expect_words(refused({.beta1 = 1}), {"beta1", "1"});
    expect_words(refused({.beta2 = -0.5}), {"beta2", "-0.5"});
    expect_words(refused({.eps = -1e-9}), {"eps"});
    expect_words(refused({.weight_decay = -2}), {"weight_decay", "-2"});
    const AdamW optimizer(sharded, {});
    expect_words(refused({}), {"already has an optimizer"});
  });
}

TEST(Guard, AStepInsideBackward) {
  on_ranks(2, [](World world) {
    Stack net;
    auto sharded = fully_shard(net, Mesh(world), stack_options(zero3()));
    AdamW optimizer(sharded, {});
    expect_words(refusal<GuardError>([&] { stack_loss(net, world.rank.value, {}, [&] { optimizer.step(); }).backward(); }),
                 {"inside backward"});
  });
}

TEST(Guard, GradientsThatNoOptimizerUsed) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        Stack net;
        auto sharded = fully_shard(net, mesh_for(world, placements), stack_options(placements));
        stack_loss(net, world.rank.value).backward();
        {
          const torch::NoGradGuard no_grad;
          EXPECT_NO_THROW(stack_loss(net, world.rank.value));  // evaluation may come between
        }
        expect_words(refusal<GuardError>([&] { stack_loss(net, world.rank.value); }),
                     {"step 1", "no optimizer used them", "accumulating()", "NoGradGuard"});
        sharded.zero_grad();
        EXPECT_NO_THROW(stack_loss(net, world.rank.value).backward());
      },
      {1, 2});
}

}  // namespace
}  // namespace tessera::test
