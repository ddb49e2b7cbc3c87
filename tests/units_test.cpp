// What becomes a unit, which layout it has, and what is left alone.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/training_loop.h"

namespace tessera::test {
namespace {

using Names = std::vector<std::string>;

Names unit_names(const Sharded& sharded) {
  Names names;
  for (const auto& unit : sharded.engine().units()) names.push_back(unit->name());
  return names;
}

Names units_with(const ShardOptions& options) {
  Names names;
  auto net = common_net();
  return unit_names(fully_shard(net, Mesh(World{}), options));
}

TEST(Units, ByNameSizeAndTogether) {
  on_ranks(1, [](World) {
    EXPECT_EQ(units_with({}), (Names{"(root)"}));
    EXPECT_EQ(units_with({.units = units_named({"m*"})}), (Names{"(root)", "middle"}));
    EXPECT_EQ(units_with({.units = units_named({"middle", "la?t"})}), (Names{"(root)", "middle", "last"}));
    EXPECT_EQ(units_with({.units = units_of_size(30)}), (Names{"first", "middle", "(root)"}));  // 35, 30 and 18 elements
    const auto either = [large = units_of_size(31), last = units_named({"l*"})](const std::string& name,
                                                                                const torch::nn::Module& module) {
      return large(name, module) || last(name, module);
    };
    EXPECT_EQ(units_with({.units = either}), (Names{"first", "(root)", "last"}));
    EXPECT_EQ(units_with({.units = units_named({"*"}), .joined = {"[ml]*"}}), (Names{"first", "middle"}));
  });
}

TEST(Units, OneOfEachTypeAndLayout) {
  on_ranks(1, [](World) {
    const ShardOptions options{.units = units_named({"middle"}),
                               .layouts = {{"*.bias", block(2)}, {"first.*", per_parameter()}}};
    EXPECT_EQ(units_with(options),
              (Names{"(root)", "(root):Float:block(2)", "middle", "middle:Float:block(2)", "(root):Float:flat"}));
  });
}

TEST(Units, PatternsThatMatchNothing) {
  on_ranks(1, [](World) {
    const auto refused = [](const ShardOptions& options) { return refusal<ConfigError>([&] { units_with(options); }); };
    expect_words(refused({.units = units_named({"block*"})}), {"unit policy matches no module"});
    expect_words(refused({.units = units_named({"m*"}), .joined = {"last"}}), {"'last'", "no unit"});
    expect_words(refused({.layouts = {{"*", flat()}, {"first.*", block(2)}}}), {"'first.*'", "block(2)", "in order"});
    expect_words(refused({.ignored = {"head.*"}}), {"'head.*'", "ignore"});
    expect_words(refused({.layouts = {{"*", block(0)}}}), {"at least 1 element"});
  });
}

TEST(Units, JoinedUnitsGiveTheSameNumbers) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements),
                               {.placements = placements, .units = units_named({"*"}), .joined = {"*st"}});
    EXPECT_EQ(unit_names(sharded), (Names{"first", "middle"}));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
  });
}

// What is ignored stays the rank's own: its gradient is that of this rank's rows.
TEST(Units, IgnoredParametersAreLeftAlone) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements, .ignored = {"last.*"}});
    EXPECT_EQ(sharded.parameter_count(), 6 * 5 + 5 + 5 * 5 + 5);
    net_s_loss(net, world, 0).backward();
    net_s_loss(plain, world, 0).backward();
    EXPECT_TRUE(torch::allclose(net->last->weight.grad(), plain->last->weight.grad()));
    EXPECT_FALSE(net->first->weight.grad().defined());
    torch::optim::SGD own(net->last->parameters(), torch::optim::SGDOptions(0.1)),
        shards(sharded.parameters(), torch::optim::SGDOptions(0.1));
    own.step();
    shards.step();
    EXPECT_FALSE(torch::equal(net->last->weight, plain->last->weight));
  });
}

// ---- what belongs to which unit ------------------------------------------------------------------------------------------

struct InnerImpl : torch::nn::Module {
  InnerImpl()
      : linear(register_module("linear", torch::nn::Linear(6, 6))), scale(register_parameter("scale", torch::ones({}))) {}
  torch::Tensor forward(const torch::Tensor& x) { return linear(x) * scale; }
  torch::nn::Linear linear{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Inner);

/// A list of two blocks, one of which is registered a second time, and an activation.
struct OuterImpl : torch::nn::Module {
  OuterImpl() : blocks(register_module("blocks", torch::nn::ModuleList())) {
    blocks->push_back(Inner());
    blocks->push_back(Inner());
    again = register_module("again", blocks->ptr<InnerImpl>(0));
    tanh = register_module("tanh", torch::nn::Tanh());
    last = register_module("last", torch::nn::Linear(6, 3));
    set_common_values(*this);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = tanh(block->as<InnerImpl>()->forward(x));
    return last(again->forward(x));
  }
  torch::nn::ModuleList blocks;
  std::shared_ptr<InnerImpl> again;
  torch::nn::Tanh tanh;
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Outer);

std::map<std::string, Names> contents(const Sharded& sharded) {
  std::map<std::string, Names> all;
  for (const auto& unit : sharded.engine().units())
    for (const auto& parameter : unit->parameters()) all[unit->name()].push_back(parameter.name);
  return all;
}

TEST(Units, AnOuterUnitOwnsWhatNoInnerOneOwnsAndNothingIsOwnedTwice) {
  on_ranks(1, [](World world) {
    const auto with = [&](const ShardOptions& options) {
      Outer net;
      return contents(fully_shard(net, Mesh(world), options));
    };
    using All = std::map<std::string, Names>;
    const std::string first = "blocks.0.", second = "blocks.1.";
    const Names linear_0{first + "linear.weight", first + "linear.bias"},
        linear_1{second + "linear.weight", second + "linear.bias"}, rest{"last.weight", "last.bias"};
    EXPECT_EQ(with({.units = units_of<torch::nn::LinearImpl>()}), (All{{first + "linear", linear_0},
                                                                       {second + "linear", linear_1},
                                                                       {"last", rest},
                                                                       {"(root)", {first + "scale", second + "scale"}}}));
    const Names both{first + "scale", linear_0[0], linear_0[1], second + "scale", linear_1[0], linear_1[1]};
    // A container that is never called itself; joined units own what either does; a module without parameters owns nothing.
    EXPECT_EQ(with({.units = units_named({"blocks"})}), (All{{"blocks", both}, {"(root)", rest}}));
    EXPECT_EQ(with({.units = units_of<InnerImpl>(), .joined = {"blocks.*"}}), (All{{"blocks.0", both}, {"(root)", rest}}));
    EXPECT_EQ(with({.units = units_named({"blocks", "tanh"})}), (All{{"blocks", both}, {"(root)", rest}}));
  });
}

TEST(Units, AnyChoiceOfUnitsGivesTheSameNumbers) {
  for (const auto& names : std::vector<Names>{{"blocks"}, {"blocks.*"}, {"blocks.*", "tanh"}, {"again", "last"}, {"*"}}) {
    TrainingLoop<Outer> loop{.build = [] { return Outer(); },
                             .loss =
                                 [](Outer& net, int64_t step, int rank) {
                                   const auto x = input_rows(step, 4 * rank, 4 * rank + 4, 6);
                                   return (net(x) - target_rows(step, 4 * rank, 4 * rank + 4, 3)).pow(2).mean();
                                 }};
    loop.options.units = units_named(names);
    expect_as_unsharded(loop, {2});
  }
}

TEST(Units, RanksThatIgnoreDifferentParametersAreTold) {
  on_ranks(2, [](World world) {
    Outer net;
    ShardOptions options{.ignored = {"last.bias"}};
    if (world.rank.value == 1) options.ignored.push_back("blocks.1.*");
    expect_words(refusal<AgreementError>([&] { fully_shard(net, Mesh(world), options); }), {"blocks.1."});
  });
}

TEST(Units, IgnoringEverythingLeavesNothingToShard) {
  on_ranks(1, [](World world) {
    Outer net;
    expect_words(refusal<ConfigError>([&] { fully_shard(net, Mesh(world), {.ignored = {"*"}}); }), {"no parameters"});
  });
}

// A part is sharded first, and then the whole around it.
TEST(Units, AShardedPartHasToBeIgnored) {
  on_ranks(2, [](World world) {
    Outer net;
    const auto part = fully_shard(*net->again, Mesh(world));
    expect_words(refusal<ConfigError>([&] { fully_shard(net, Mesh(world)); }), {"'blocks.0.scale'", "sharded already"});
    EXPECT_EQ(contents(fully_shard(net, Mesh(world), {.ignored = {"blocks.0.*"}}))["(root)"].size(), 5U);
  });
}

TEST(Units, TheNameOfAnAxisChangesNothing) {
  on_ranks(2, [](World world) {
    const auto run = [&](const Mesh& mesh, const Placements& placements) {
      auto net = common_net();
      auto sharded = fully_shard(net, mesh, net_s_options(placements));
      torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
      expect_sgd_steps(net, sharded, optimizer, world);
      return sharded.parameters();
    };
    const auto plain = run(Mesh(world), zero3()), named_axis = run(Mesh(world, {{"x", 2}}), zero3()),
               two = run(Mesh(world, {{"r", 1}, {"s", 2}}), hybrid("s", "r"));
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_EQ(named_axis[i].sizes(), plain[i].sizes());
      EXPECT_EQ(two[i].sizes(), plain[i].sizes());
    }
  });
}

}  // namespace
}  // namespace tessera::test
