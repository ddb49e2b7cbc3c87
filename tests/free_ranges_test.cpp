#include "tessera/storage/free_ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <utility>
#include <vector>

namespace tessera {
namespace {

TEST(FreeRanges, TakesTheLowestThatFitsAndMergesNeighbours) {
  FreeRanges free(100);
  EXPECT_EQ(free.take(10), 0u);
  EXPECT_EQ(free.take(20), 10u);
  EXPECT_EQ(free.take(5), 30u);
  free.insert({0, 10});
  free.insert({30, 5});  // merges with the rest
  EXPECT_EQ(free.take(12), 30u);
  EXPECT_EQ(free.take(10), 0u);
  free.insert({0, 10});
  free.insert({10, 20});  // merges on one side
  free.insert({30, 12});  // merges on both
  std::vector<GranuleRange> ranges;
  free.list(ranges);
  EXPECT_EQ(ranges, (std::vector<GranuleRange>{{0, 100}}));
  EXPECT_EQ(free.take(101), std::nullopt);
  EXPECT_EQ(free.take(100), 0u);
  EXPECT_EQ(free.take(1), std::nullopt);
}

TEST(FreeRanges, EqualsASimpleModel) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  constexpr uint32_t kSize = 2000;
  FreeRanges free(kSize);
  std::vector<bool> taken(kSize);
  std::vector<GranuleRange> blocks, ranges, expected;
  for (int step = 0; step < 20000; ++step) {
    if (blocks.empty() || random() % 100 < 52) {
      const uint32_t count = 1 + random() % (random() % 8 == 0 ? 200 : 12);
      const std::vector<bool> hole(count, false);
      const auto fits = std::search(taken.begin(), taken.end(), hole.begin(), hole.end());
      const auto begin = free.take(count);
      ASSERT_EQ(begin.has_value(), fits != taken.end());
      if (!begin) continue;
      ASSERT_EQ(*begin, fits - taken.begin());
      std::fill_n(fits, count, true);
      blocks.push_back({*begin, count});
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      std::fill_n(taken.begin() + blocks.back().begin, blocks.back().count, false);
      free.insert(blocks.back());
      blocks.pop_back();
    }
    if (step % 50 != 0) continue;
    expected.clear();
    for (uint32_t i = 0; i < kSize; ++i) {
      if (taken[i]) continue;
      if (!expected.empty() && expected.back().end() == i)
        ++expected.back().count;
      else
        expected.push_back({i, 1});
    }
    free.list(ranges);
    ASSERT_EQ(ranges, expected);
  }
}

}  // namespace
}  // namespace tessera
