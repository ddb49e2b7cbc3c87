// What becomes a unit, which layout it has, and what is left alone.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

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

}  // namespace
}  // namespace tessera::test
