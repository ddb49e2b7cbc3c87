#include "tessera/layout/layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tessera/base/error.h"
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

Layout flat(const std::vector<NamedShape>& shapes, int ranks, int64_t element_size = kFloat, Bytes alignment = Bytes{64}) {
  return Layout::flat(shapes, ranks, element_size, alignment);
}

TEST(Layout, SplitsInsideAParameter) {
  const auto layout = flat({{"weight", {3, 4}}, {"bias", {3}}}, 2, kFloat, Bytes{4});
  EXPECT_EQ(layout.offset(0), Numel(0));
  EXPECT_EQ(layout.offset(1), Numel(12));
  EXPECT_EQ(layout.chunk(), Numel(8));
  EXPECT_EQ(layout.owned(0, Rank{0}), (Interval{0, 8}));
  EXPECT_EQ(layout.owned(0, Rank{1}), (Interval{8, 12}));
  EXPECT_EQ(layout.owned(1, Rank{0}), (Interval{}));
  EXPECT_EQ(layout.owned(1, Rank{1}), (Interval{0, 3}));
  EXPECT_EQ(layout.total(), Numel(16));
  EXPECT_EQ(layout.real(), Numel(15));
  EXPECT_EQ(layout.padding(), Numel(1));
}

TEST(Layout, AlignsStartsAndChunksTo64Bytes) {
  const auto floats = flat({{"weight", {3, 4}}, {"bias", {3}}}, 2);
  EXPECT_EQ(floats.offset(1), Numel(16));
  EXPECT_EQ(floats.chunk(), Numel(16));
  EXPECT_EQ(floats.owned(0, Rank{0}), (Interval{0, 12}));
  EXPECT_EQ(floats.owned(1, Rank{1}), (Interval{0, 3}));
  EXPECT_EQ(floats.padding(), Numel(17));

  const auto halves = flat({{"weight", {3, 4}}, {"bias", {3}}}, 2, 2);
  EXPECT_EQ(halves.offset(1), Numel(32));
  EXPECT_EQ(halves.chunk(), Numel(32));

  const auto doubles = flat({{"weight", {3, 4}}, {"bias", {3}}}, 2, 8);
  EXPECT_EQ(doubles.offset(1), Numel(16));
  EXPECT_EQ(doubles.chunk(), Numel(16));
  EXPECT_EQ(doubles.total(), Numel(32));
}

TEST(Layout, ChunksAreRoundedUpToTheAlignment) {
  const auto layout = flat({{"weight", {100}}}, 3);
  EXPECT_EQ(layout.chunk(), Numel(48));  // ⌈112 / 3⌉ = 38, then the next multiple of 16
  EXPECT_EQ(layout.total(), Numel(144));
  EXPECT_EQ(layout.owned(0, Rank{0}), (Interval{0, 48}));
  EXPECT_EQ(layout.owned(0, Rank{1}), (Interval{48, 96}));
  EXPECT_EQ(layout.owned(0, Rank{2}), (Interval{96, 100}));
}

TEST(Layout, OneRankOwnsEverything) {
  const auto layout = flat({{"weight", {5, 7}}, {"bias", {5}}}, 1);
  EXPECT_EQ(layout.owned(0, Rank{0}), (Interval{0, 35}));
  EXPECT_EQ(layout.owned(1, Rank{0}), (Interval{0, 5}));
  EXPECT_EQ(layout.total(), Numel(64));
}

TEST(Layout, AnEmptyShapeIsOneElement) {
  const auto layout = flat({{"scale", {}}, {"bias", {2}}}, 1);
  EXPECT_EQ(layout.numel(0), Numel(1));
  EXPECT_EQ(layout.offset(1), Numel(16));
}

TEST(Layout, ZeroElementsTakeNoRoomAndBelongToNobody) {
  const auto layout = flat({{"a", {3}}, {"none", {0, 5}}, {"b", {3}}}, 2);
  EXPECT_EQ(layout.numel(1), Numel(0));
  EXPECT_EQ(layout.offset(2), Numel(16));
  for (const int rank : {0, 1}) EXPECT_EQ(layout.owned(1, Rank{rank}), Interval{});
  EXPECT_EQ(layout.real(), Numel(6));
}

TEST(Layout, AUnitOfNothing) {
  const auto layout = flat({}, 4);
  EXPECT_EQ(layout.parameters(), 0U);
  EXPECT_EQ(layout.total(), Numel(0));
  const auto empty = flat({{"none", {0}}}, 4);
  EXPECT_EQ(empty.total(), Numel(0));
  EXPECT_EQ(empty.owned(0, Rank{3}), Interval{});
}

TEST(Layout, MoreRanksThanElements) {
  const auto layout = flat({{"scale", {}}, {"pair", {2}}}, 5);
  EXPECT_EQ(layout.chunk(), Numel(16));
  EXPECT_EQ(layout.total(), Numel(80));
  EXPECT_EQ(layout.owned(0, Rank{0}), (Interval{0, 1}));
  EXPECT_EQ(layout.owned(1, Rank{1}), (Interval{0, 2}));
  for (const int rank : {2, 3, 4})
    for (const ParameterIndex p : {0, 1}) EXPECT_TRUE(layout.owned(p, Rank{rank}).empty()) << rank;
}

TEST(Layout, WithinGivesAnIntervalOfTheParameter) {
  const auto layout = flat({{"a", {10}}, {"b", {20}}}, 2);  // a at 0, b at 16
  EXPECT_EQ(layout.within(1, {0, 16}), Interval{});
  EXPECT_EQ(layout.within(1, {0, 20}), (Interval{0, 4}));
  EXPECT_EQ(layout.within(1, {20, 30}), (Interval{4, 14}));
  EXPECT_EQ(layout.within(1, {30, 1000}), (Interval{14, 20}));
  EXPECT_EQ(layout.within(0, {10, 16}), Interval{});  // the padding behind it
  EXPECT_EQ(layout.within(0, layout.everything()), (Interval{0, 10}));
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
    return refusal<ConfigError>([&] { flat(shapes, ranks, element_size, alignment); });
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

// Every element of the unit's buffer and of each parameter has exactly one owner, whatever is drawn.
void check(const Layout& layout, const std::vector<NamedShape>& shapes, int ranks, int64_t grain) {
  ASSERT_EQ(layout.parameters(), shapes.size());
  ASSERT_EQ(layout.chunk().value % grain, 0);
  ASSERT_EQ(layout.total().value, layout.chunk().value * ranks);
  std::vector<int> holders(static_cast<size_t>(layout.total().value), 0);
  int64_t end = 0;
  for (ParameterIndex p = 0; p < shapes.size(); ++p) {
    int64_t numel = 1;
    for (const int64_t size : shapes[p].shape) numel *= size;
    ASSERT_EQ(layout.numel(p).value, numel);
    ASSERT_EQ(layout.offset(p).value % grain, 0);
    ASSERT_GE(layout.offset(p).value, end);
    ASSERT_LT(layout.offset(p).value, end + grain);
    end = layout.offset(p).value + numel;
    ASSERT_LE(end, layout.total().value);
    for (int64_t k = 0; k < numel; ++k) ++holders[static_cast<size_t>(layout.offset(p).value + k)];

    std::vector<int> owners(static_cast<size_t>(numel), 0);
    for (int r = 0; r < ranks; ++r) {
      const Interval owned = layout.owned(p, Rank(r));
      ASSERT_EQ(owned, layout.within(p, layout.chunk_of(Rank(r))));
      ASSERT_TRUE(!owned.empty() || owned == Interval{});
      for (int64_t k = owned.begin; k < owned.end; ++k) {
        ++owners.at(static_cast<size_t>(k));
        ASSERT_EQ((layout.offset(p).value + k) / layout.chunk().value, r);
      }
    }
    for (const int count : owners) ASSERT_EQ(count, 1);
  }
  int64_t real = 0;
  for (const int count : holders) {
    ASSERT_LE(count, 1);
    real += count;
  }
  ASSERT_EQ(layout.real().value, real);
  ASSERT_EQ(layout.padding().value, layout.total().value - real);
  ASSERT_LE(layout.padding().value, static_cast<int64_t>(shapes.size()) * (grain - 1) + ranks * grain);
}

TEST(Layout, EveryElementHasOneOwner) {
  const char* given = std::getenv("TESSERA_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  SCOPED_TRACE("TESSERA_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 2000; ++draw) {
    const auto shapes = random_shapes(random);
    const int ranks = std::uniform_int_distribution<int>(1, 9)(random);
    const int64_t element_size = int64_t{1} << std::uniform_int_distribution<int>(1, 3)(random);
    const int64_t grain = int64_t{1} << std::uniform_int_distribution<int>(0, 5)(random);
    SCOPED_TRACE("draw " + std::to_string(draw) + ": " + std::to_string(ranks) + " ranks, a grain of " +
                 std::to_string(grain));
    check(flat(shapes, ranks, element_size, Bytes(element_size * grain)), shapes, ranks, grain);
    if (HasFatalFailure()) return;
  }
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
