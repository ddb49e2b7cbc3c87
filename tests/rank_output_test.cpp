#include "cli/rank_output.h"

#include <gtest/gtest.h>

namespace tessera::cli {
namespace {

using std::chrono::milliseconds;
using Lines = std::vector<std::string>;

class Cutter : public ::testing::Test {
 protected:
  void feed(std::string_view bytes, int at_ms = 0) { cutter_.feed(bytes, start_ + milliseconds(at_ms)); }

  const LineCutter::Clock::time_point start_ = LineCutter::Clock::time_point{} + std::chrono::hours(1);
  Lines lines_;
  LineCutter cutter_{[this](std::string_view line) { lines_.emplace_back(line); }};
};

TEST_F(Cutter, CutsAtLineEndsWhereverTheBytesWereCut) {
  feed("one\ntw");
  feed("o\n");
  feed("\nfour\n");
  EXPECT_EQ(lines_, (Lines{"one", "two", "", "four"}));
}

TEST_F(Cutter, GivesAnUnendedLastLine) {
  feed("all\nbut");
  cutter_.finish();
  cutter_.finish();
  EXPECT_EQ(lines_, (Lines{"all", "but"}));
}

TEST_F(Cutter, TakesCarriageReturnAndLineFeedAsOneEnd) {
  feed("dos\r");
  feed("\nline\r\n");
  EXPECT_EQ(lines_, (Lines{"dos", "line"}));
}

TEST_F(Cutter, ThinsOutAProgressBar) {
  for (int step = 1; step <= 100; ++step) feed("\rstep " + std::to_string(step), step * 25);
  feed("\ndone\n", 2600);
  EXPECT_EQ(lines_, (Lines{"step 1", "step 41", "step 81", "step 100", "done"}));
}

TEST_F(Cutter, TakesBarsThatEndWithTheCarriageReturn) {
  feed("10%\r20%\r30%\r", 0);
  cutter_.finish();
  EXPECT_EQ(lines_, (Lines{"10%", "30%"}));
}

TEST_F(Cutter, GivesLongLinesInPieces) {
  const std::string whole(150'000, 'x');
  feed(whole);
  EXPECT_EQ(lines_.size(), 2u);
  feed("\n");
  ASSERT_EQ(lines_.size(), 3u);
  EXPECT_EQ(lines_[0].size(), 64u << 10);
  EXPECT_EQ(lines_[0] + lines_[1] + lines_[2], whole);
}

TEST_F(Cutter, NeverCutsInsideACharacter) {
  std::string whole = "a";
  while (whole.size() < 140'000) whole += "é€😀";
  feed(whole + "\n");
  ASSERT_EQ(lines_.size(), 3u);
  for (const auto& line : lines_) EXPECT_NE(static_cast<unsigned char>(line[0]) & 0xC0, 0x80);
  EXPECT_EQ(lines_[0] + lines_[1] + lines_[2], whole);
}

TEST_F(Cutter, TakesBytesThatAreNoText) {
  const std::string whole(200'000, '\x80');
  feed(whole + std::string("\0\n", 2));
  std::string joined;
  for (const auto& line : lines_) joined += line;
  EXPECT_EQ(joined, whole + '\0');
}

TEST(Tail, KeepsTheLastTwentyLines) {
  Tail tail;
  for (int i = 0; i < 30; ++i) tail.add(std::to_string(i));
  ASSERT_EQ(tail.lines().size(), 20u);
  EXPECT_EQ(tail.lines().front(), "10");
  EXPECT_EQ(tail.lines().back(), "29");
  tail.add(std::string(5000, 'x'));
  EXPECT_EQ(tail.lines().back(), std::string(2000, 'x') + "…");
}

TEST(RankPrefix, IsColouredOnDemand) {
  EXPECT_EQ(rank_prefix(12, false), "[rank 12] ");
  EXPECT_NE(rank_prefix(0, true), rank_prefix(1, true));
}

}  // namespace
}  // namespace tessera::cli
