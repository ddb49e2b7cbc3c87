#include "tessera/layout/layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/layout/division.h"
#include "tessera/layout/placements.h"
#include "tests/support/refusal.h"

namespace tessera {

void PrintTo(const Interval& interval, std::ostream* stream) {
  *stream << "[" << interval.begin << ", " << interval.end << ")";
}

namespace {

using test::expect_words;
using test::refusal;

constexpr int64_t kFloat = 4;

using Runs = std::vector<Run>;

Layout flat_layout(const std::vector<NamedShape>& shapes, int ranks, int64_t element_size = kFloat,
                   Bytes alignment = Bytes{64}) {
  return {shapes, tessera::flat(), ranks, element_size, alignment};
}

/// The elements of `p` that `rank` of `ranks` has in a layout whose parts are contiguous.
Interval owned(const Layout& layout, ParameterIndex p, int rank, int ranks) {
  const auto runs = layout.runs(p, rank, ranks);
  EXPECT_LE(runs.size(), 1U);
  return runs.empty() ? Interval{} : Interval{runs[0].begin, runs[0].begin + runs[0].count};
}

TEST(Layout, SplitsInsideAParameter) {
  const auto layout = flat_layout({{"weight", {3, 4}}, {"bias", {3}}}, 2, kFloat, Bytes{4});
  EXPECT_EQ(layout.offset(0), Numel(0));
  EXPECT_EQ(layout.offset(1), Numel(12));
  EXPECT_EQ(layout.shard(0, 2), Numel(8));
  EXPECT_EQ(owned(layout, 0, 0, 2), (Interval{0, 8}));
  EXPECT_EQ(owned(layout, 0, 1, 2), (Interval{8, 12}));
  EXPECT_EQ(owned(layout, 1, 0, 2), (Interval{}));
  EXPECT_EQ(owned(layout, 1, 1, 2), (Interval{0, 3}));
  EXPECT_EQ(layout.total(), Numel(16));
  EXPECT_EQ(layout.real(), Numel(15));
  EXPECT_EQ(layout.padding(), Numel(1));
}

TEST(Layout, AlignsStartsAndChunksTo64Bytes) {
  const auto floats = flat_layout({{"weight", {3, 4}}, {"bias", {3}}}, 2);
  EXPECT_EQ(floats.offset(1), Numel(16));
  EXPECT_EQ(floats.shard(0, 2), Numel(16));
  EXPECT_EQ(owned(floats, 0, 0, 2), (Interval{0, 12}));
  EXPECT_EQ(owned(floats, 1, 1, 2), (Interval{0, 3}));
  EXPECT_EQ(floats.padding(), Numel(17));

  const auto halves = flat_layout({{"weight", {3, 4}}, {"bias", {3}}}, 2, 2);
  EXPECT_EQ(halves.offset(1), Numel(32));
  EXPECT_EQ(halves.shard(0, 2), Numel(32));

  const auto doubles = flat_layout({{"weight", {3, 4}}, {"bias", {3}}}, 2, 8);
  EXPECT_EQ(doubles.offset(1), Numel(16));
  EXPECT_EQ(doubles.shard(0, 2), Numel(16));
  EXPECT_EQ(doubles.total(), Numel(32));
}

TEST(Layout, ChunksAreRoundedUpToTheAlignment) {
  const auto layout = flat_layout({{"weight", {100}}}, 3);
  EXPECT_EQ(layout.shard(0, 3), Numel(48));  // ⌈112 / 3⌉ = 38, then the next multiple of 16
  EXPECT_EQ(layout.total(), Numel(144));
  EXPECT_EQ(owned(layout, 0, 0, 3), (Interval{0, 48}));
  EXPECT_EQ(owned(layout, 0, 1, 3), (Interval{48, 96}));
  EXPECT_EQ(owned(layout, 0, 2, 3), (Interval{96, 100}));
}

TEST(Layout, OneRankOwnsEverything) {
  const auto layout = flat_layout({{"weight", {5, 7}}, {"bias", {5}}}, 1);
  EXPECT_EQ(owned(layout, 0, 0, 1), (Interval{0, 35}));
  EXPECT_EQ(owned(layout, 1, 0, 1), (Interval{0, 5}));
  EXPECT_EQ(layout.total(), Numel(64));
}

TEST(Layout, AnEmptyShapeIsOneElement) {
  const auto layout = flat_layout({{"scale", {}}, {"bias", {2}}}, 1);
  EXPECT_EQ(layout.numel(0), Numel(1));
  EXPECT_EQ(layout.offset(1), Numel(16));
}

TEST(Layout, ZeroElementsTakeNoRoomAndBelongToNobody) {
  const auto layout = flat_layout({{"a", {3}}, {"none", {0, 5}}, {"b", {3}}}, 2);
  EXPECT_EQ(layout.numel(1), Numel(0));
  EXPECT_EQ(layout.offset(2), Numel(16));
  for (const int rank : {0, 1}) EXPECT_EQ(owned(layout, 1, rank, 2), Interval{});
  EXPECT_EQ(layout.real(), Numel(6));
}

TEST(Layout, AUnitOfNothing) {
  const auto layout = flat_layout({}, 4);
  EXPECT_EQ(layout.parameters(), 0U);
  EXPECT_EQ(layout.total(), Numel(0));
  const auto empty = flat_layout({{"none", {0}}}, 4);
  EXPECT_EQ(empty.total(), Numel(0));
  EXPECT_EQ(owned(empty, 0, 3, 4), Interval{});
}

TEST(Layout, MoreRanksThanElements) {
  const auto layout = flat_layout({{"scale", {}}, {"pair", {2}}}, 5);
  EXPECT_EQ(layout.shard(0, 5), Numel(16));
  EXPECT_EQ(layout.total(), Numel(80));
  EXPECT_EQ(owned(layout, 0, 0, 5), (Interval{0, 1}));
  EXPECT_EQ(owned(layout, 1, 1, 5), (Interval{0, 2}));
  for (const int rank : {2, 3, 4})
    for (const ParameterIndex p : {0, 1}) EXPECT_TRUE(owned(layout, p, rank, 5).empty()) << rank;
}

TEST(Layout, Intersections) {
  EXPECT_EQ(intersect({0, 5}, {3, 9}), (Interval{3, 5}));
  EXPECT_EQ(intersect({3, 9}, {0, 5}), (Interval{3, 5}));
  EXPECT_EQ(intersect({0, 9}, {3, 5}), (Interval{3, 5}));
  EXPECT_EQ(intersect({0, 3}, {3, 5}), Interval{});
  EXPECT_EQ(intersect({0, 2}, {7, 9}), Interval{});
  EXPECT_EQ(intersect({4, 4}, {0, 9}), Interval{});
}

TEST(Layout, RefusalsNameTheCause) {
  const auto refused = [](const std::vector<NamedShape>& shapes, int ranks = 2, int64_t element_size = kFloat,
                          Bytes alignment = Bytes{64}) {
    return refusal<ConfigError>([&] { flat_layout(shapes, ranks, element_size, alignment); });
  };
  expect_words(refused({{"good", {2}}, {"layer.weight", {2, -3}}}), {"'layer.weight'", "-3"});
  expect_words(refused({{"layer.weight", {int64_t{1} << 62, 4}}}), {"'layer.weight'"});
  expect_words(refused({{"first", {int64_t{1} << 55}}, {"second", {(int64_t{1} << 55) + 1}}}), {"'second'", "2^56"});
  expect_words(refused({{"layer.weight", {std::numeric_limits<int64_t>::max()}}}), {"'layer.weight'", "2^56"});
  expect_words(refused({{"a", {2}}}, 0), {"at least 1 rank"});
  expect_words(refused({{"a", {2}}}, 2, 8, Bytes{4}), {"4 bytes", "8"});
  expect_words(refused({{"a", {2}}}, 2, 4, Bytes{0}), {"0 bytes"});
  expect_words(refused({{"a", {2}}}, 2, 4, Bytes{-64}), {"-64 bytes"});
  expect_words(refused({{"a", {2}}}, 2, 0), {"element"});
}

std::vector<NamedShape> random_shapes(std::mt19937_64& random) {
  const auto draw = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  std::vector<NamedShape> shapes(static_cast<size_t>(draw(0, 9)));
  for (auto& [name, shape] : shapes) {
    name = "p" + std::to_string(&name - &shapes[0].name);
    shape.resize(static_cast<size_t>(draw(0, 3)));
    for (auto& size : shape) size = draw(0, 9) == 0 ? 0 : draw(1, 13);
  }
  return shapes;
}

// What holds for every layout: parameters lie apart in the unit's buffer, each element of each belongs to one part, and the
// parts' packed shards are filled without overlap, whatever is drawn.
void check(const Layout& layout, const std::vector<NamedShape>& shapes, int parts) {
  ASSERT_EQ(layout.parameters(), shapes.size());
  int64_t end = 0, real = 0;
  for (ParameterIndex p = 0; p < shapes.size(); ++p) {
    int64_t numel = 1;
    for (const int64_t size : shapes[p].shape) numel *= size;
    ASSERT_EQ(layout.numel(p).value, numel);
    ASSERT_EQ(layout.offset(p).value, round_up(end, layout.grain()));
    end = layout.offset(p).value + numel;
    ASSERT_LE(end, layout.total().value);
    real += numel;
    std::vector<int> owners(static_cast<size_t>(numel), 0);
    for (int part = 0; part < parts; ++part) {
      const auto runs = layout.runs(p, part, parts);
      int64_t shown = 1;
      for (const int64_t size : layout.shard_shape(p, part, parts)) shown *= size;
      ASSERT_EQ(shown, count_of(runs));
      for (const Run& run : runs) {
        ASSERT_GT(run.count, 0);
        for (int64_t k = run.begin; k < run.begin + run.count; ++k) ++owners.at(static_cast<size_t>(k));
      }
    }
    for (const int count : owners) ASSERT_EQ(count, 1);
  }
  ASSERT_EQ(layout.real().value, real);
  ASSERT_EQ(layout.padding().value, layout.total().value - real);
  for (int part = 0; part < parts; ++part) {
    std::vector<int> used(static_cast<size_t>(layout.shard(part, parts).value), 0);
    for (ParameterIndex p = 0; p < shapes.size(); ++p) {
      int64_t local = -1;
      for (const Run& run : layout.runs(p, part, parts)) {
        if (local >= 0) {
          ASSERT_EQ(run.local, local);  // a parameter's runs follow each other
        }
        local = run.local + run.count;
        for (int64_t k = run.local; k < local; ++k) ++used.at(static_cast<size_t>(k));
      }
    }
    for (const int count : used) ASSERT_LE(count, 1);
    ASSERT_LE(layout.shard(part, parts), layout.largest_shard(parts));
  }
}

template <class Action>
void for_random_draws(const Action& action) {
  const char* given = std::getenv("TESSERA_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  SCOPED_TRACE("TESSERA_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 1000; ++draw) {
    SCOPED_TRACE("draw " + std::to_string(draw));
    action(random);
    if (testing::Test::HasFatalFailure()) return;
  }
}

int between(std::mt19937_64& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

LayoutKind random_kind(std::mt19937_64& random) {
  switch (between(random, 0, 3)) {
    case 0:
      return flat();
    case 1:
      return per_parameter(between(random, -2, 2));
    case 2:
      return block(between(random, 1, 40));
    default:
      return whole_parameters();
  }
}

TEST(Layout, EveryElementHasOneOwner) {
  for_random_draws([](std::mt19937_64& random) {
    const auto shapes = random_shapes(random);
    const int parts = between(random, 1, 6), ranks = parts * between(random, 1, 3);
    const int64_t element_size = int64_t{1} << between(random, 1, 3), grain = int64_t{1} << between(random, 0, 5);
    const LayoutKind kind = random_kind(random);
    SCOPED_TRACE(name_of(kind) + ", " + std::to_string(parts) + " parts, a grain of " + std::to_string(grain));
    const Layout layout(shapes, kind, ranks, element_size, Bytes(element_size * grain));
    check(layout, shapes, parts);
    check(layout, shapes, ranks);
    if (kind != flat()) return;
    ASSERT_EQ(layout.shard(0, ranks).value * ranks, layout.total().value);
    ASSERT_EQ(layout.shard(0, ranks).value % grain, 0);
    ASSERT_LE(layout.padding().value, static_cast<int64_t>(shapes.size()) * (grain - 1) + ranks * grain);
  });
}

TEST(Layout, PerParameterSplitsRows) {
  const std::vector<NamedShape> shapes = {{"matrix", {7, 3}}, {"bias", {2}}, {"scale", {}}};
  const Layout layout(shapes, per_parameter(), 4, kFloat, Bytes{4});
  EXPECT_EQ(layout.total(), Numel(24));                // no padding to equal chunks
  EXPECT_EQ(layout.runs(0, 0, 4), (Runs{{0, 6, 0}}));  // ⌈7 / 4⌉ = 2 rows
  EXPECT_EQ(layout.runs(0, 3, 4), (Runs{{18, 3, 0}}));
  EXPECT_EQ(layout.runs(1, 1, 4), (Runs{{1, 1, 6}}));
  EXPECT_TRUE(layout.runs(1, 2, 4).empty());
  EXPECT_EQ(layout.runs(2, 0, 4), (Runs{{0, 1, 7}}));
  EXPECT_EQ(layout.shard_shape(0, 3, 4), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(layout.shard_shape(1, 3, 4), (std::vector<int64_t>{0}));
  EXPECT_EQ(layout.shard_shape(2, 0, 4), (std::vector<int64_t>{}));
  EXPECT_EQ(layout.shard(0, 4), Numel(8));
}

TEST(Layout, PerParameterSplitsAnotherDim) {
  const std::vector<NamedShape> shapes = {{"matrix", {2, 5}}, {"bias", {3}}};
  const Layout layout(shapes, per_parameter(1), 2, kFloat, Bytes{4});
  EXPECT_EQ(layout.runs(0, 0, 2), (Runs{{0, 3, 0}, {5, 3, 3}}));
  EXPECT_EQ(layout.runs(0, 1, 2), (Runs{{3, 2, 0}, {8, 2, 2}}));
  EXPECT_EQ(layout.runs(1, 1, 2), (Runs{{2, 1, 4}}));  // along its only dim
  EXPECT_EQ(layout.shard_shape(0, 1, 2), (std::vector<int64_t>{2, 2}));
}

TEST(Layout, BlocksAreNotCut) {
  const std::vector<NamedShape> shapes = {{"a", {10}}, {"b", {10}}};
  const Layout blocks(shapes, block(4), 3, kFloat, Bytes{4});
  EXPECT_EQ(blocks.runs(0, 0, 3), (Runs{{0, 8, 0}}));
  EXPECT_EQ(blocks.runs(0, 1, 3), (Runs{{8, 2, 0}}));
  EXPECT_EQ(blocks.runs(1, 1, 3), (Runs{{0, 4, 2}}));
  EXPECT_EQ(blocks.runs(1, 2, 3), (Runs{{4, 6, 0}}));
  const Layout whole(shapes, whole_parameters(), 2, kFloat);
  EXPECT_EQ(whole.runs(0, 0, 2), (Runs{{0, 10, 0}}));
  EXPECT_EQ(whole.runs(1, 1, 2), (Runs{{0, 10, 0}}));
  expect_words(refusal<ConfigError>([&] { Layout(shapes, block(0), 2, kFloat); }), {"at least 1 element"});
}

TEST(Layout, AClippedRunKeepsItsPlace) {
  const Runs runs = {{0, 3, 10}, {5, 3, 13}};
  EXPECT_EQ(clip(runs, {11, 14}), (Runs{{1, 2, 11}, {5, 1, 13}}));
  EXPECT_TRUE(clip(runs, {0, 10}).empty());
}

// ---- division --------------------------------------------------------------------------------------------------------

Mesh mesh_of(int replicas, int shards) {
  return {{.rank = Rank(0), .size = replicas * shards}, {{"replicate", replicas}, {"shard", shards}}};
}

TEST(Division, HybridOnTwoTimesTwo) {
  const Mesh mesh = mesh_of(2, 2);
  const Division one(hybrid("shard", "replicate"), mesh), both(hybrid("shard", "replicate", true), mesh);
  EXPECT_EQ(one.parameter_parts(), 2);
  EXPECT_EQ(one.optimizer_parts(), 2);
  EXPECT_EQ(both.optimizer_parts(), 4);
  EXPECT_EQ(one.copies(), 2);
  // Ranks 0, 1 are a shard group, and so are 2, 3: row-major, the last axis fastest.
  for (const auto* division : {&one, &both}) {
    EXPECT_EQ(division->copy(Rank(0)), division->copy(Rank(1)));
    EXPECT_NE(division->copy(Rank(0)), division->copy(Rank(2)));
    EXPECT_EQ(division->parameter_part(Rank(0)), division->parameter_part(Rank(2)));
    EXPECT_NE(division->parameter_part(Rank(0)), division->parameter_part(Rank(1)));
  }
  EXPECT_TRUE(one.shares_sums());
  EXPECT_FALSE(one.copies_exchange());
  EXPECT_FALSE(both.shares_sums());
  EXPECT_TRUE(both.copies_exchange());
}

TEST(Division, RefusalsNameTheAxes) {
  const auto refused = [](const Placements& placements, const Mesh& mesh) {
    return refusal<ConfigError>([&] { Division(placements, mesh); });
  };
  expect_words(refused(zero3(), mesh_of(2, 2)), {"zero3", "'replicate' (2), 'shard' (2)"});
  expect_words(refused(hybrid("shard", "copies"), mesh_of(2, 2)), {"'copies'", "'replicate', 'shard'"});
  expect_words(refused(hybrid("shard", "shard"), mesh_of(1, 1)), {"the same axis 'shard'"});
  const Mesh cube({.size = 8}, {{"a", 2}, {"b", 2}, {"c", 2}});
  expect_words(refused(hybrid("a", "b"), cube), {"'a' (2)", "'b' (2)", "8 ranks"});
  for (const auto& placements : {ddp(), zero1(), zero2(), zero3()}) EXPECT_NO_THROW(Division(placements, mesh_of(1, 3)));
}

TEST(Division, EveryElementIsHeldUpdatedAndSummed) {
  for_random_draws([](std::mt19937_64& random) {
    const auto shapes = random_shapes(random);
    const int replicas = between(random, 1, 3), shards = between(random, 1, 3), ranks = replicas * shards;
    const Mesh mesh = mesh_of(replicas, shards);
    const bool hybrids = between(random, 0, 1) == 1 || (replicas > 1 && shards > 1);
    const Placements placements =
        hybrids ? hybrid("shard", "replicate", between(random, 0, 1) == 1)
                : std::vector{ddp(), zero1(), zero2(), zero3()}[static_cast<size_t>(between(random, 0, 3))];
    const LayoutKind kind = random_kind(random);
    SCOPED_TRACE(name_of(placements) + ", " + name_of(kind) + ", " + std::to_string(replicas) + " x " +
                 std::to_string(shards));
    const Layout layout(shapes, kind, ranks, kFloat, Bytes{4});
    const Division division(placements, mesh);
    for (ParameterIndex p = 0; p < shapes.size(); ++p) {
      const auto numel = static_cast<size_t>(layout.numel(p).value);
      std::vector<int> held(numel, 0), updated(numel, 0), summed(numel, 0);
      const auto count = [](std::vector<int>& counts, const Runs& runs) {
        for (const auto& run : runs)
          for (int64_t k = run.begin; k < run.begin + run.count; ++k) ++counts.at(static_cast<size_t>(k));
      };
      for (int r = 0; r < ranks; ++r) {
        count(held, division.held(layout, p, Rank(r)));
        count(updated, division.updated(layout, p, Rank(r)));
        count(summed, division.summed(layout, p, Rank(r)));
      }
      for (size_t k = 0; k < numel; ++k) {
        ASSERT_EQ(held[k], division.copies());
        ASSERT_EQ(updated[k], ranks / division.optimizer_parts());
        ASSERT_EQ(summed[k], 1);
      }
    }
  });
}

TEST(Placements, NamesAreTheirValues) {
  EXPECT_EQ(placements_named("ddp"), (Placements{}));
  EXPECT_EQ(placements_named("zero1"), (Placements{.optimizer = Placement::sharded}));
  EXPECT_EQ(placements_named("zero2"), (Placements{.gradient = Placement::sharded, .optimizer = Placement::sharded}));
  EXPECT_EQ(placements_named("zero3"), (Placements{Placement::sharded, Placement::sharded, Placement::sharded}));
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"}) {
    EXPECT_EQ(name_of(placements_named(name)), name);
    EXPECT_NO_THROW(check(placements_named(name)));
  }
  EXPECT_EQ(name_of(hybrid("s", "r")), "hybrid(s, r)");
  EXPECT_NO_THROW(check(hybrid("s", "r", true)));
  expect_words(refusal<ConfigError>([] { check(hybrid("s", "")); }), {"both axes", "'s'"});
  expect_words(refusal<ConfigError>([] { placements_named("zero4"); }), {"'zero4'", "ddp", "zero1", "zero2", "zero3"});
}

TEST(Placements, WhatCannotBeIsRefused) {
  const Placement sharded = Placement::sharded;
  for (const Placements& placements :
       {Placements{.parameter = sharded}, Placements{.gradient = sharded},
        Placements{.parameter = sharded, .gradient = sharded}, Placements{.parameter = sharded, .optimizer = sharded}})
    expect_words(refusal<ConfigError>([&] { check(placements); }), {"parameter=", "gradient=", "optimizer="});
}

}  // namespace
}  // namespace tessera
