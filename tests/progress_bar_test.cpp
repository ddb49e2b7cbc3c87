#include "cli/progress_bar.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

namespace tessera::cli {
namespace {

using std::chrono::seconds;

const TrainProgress kHalf{.step = 50,
                          .steps = 100,
                          .loss = 2.34567,
                          .tokens_per_second = 3421.7,
                          .memory_bytes = 210.0 * 1024 * 1024,
                          .exposed_share = 0.0123,
                          .seconds_left = 83};

/// Sets an environment variable while it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const old = std::getenv(name)) old_ = old, had_ = true;
    ::setenv(name, value, 1);
  }
  ~Variable() { had_ ? ::setenv(name_, old_.c_str(), 1) : ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

std::string read_some(int descriptor) {
  char bytes[1 << 14];
  const ssize_t count = ::read(descriptor, bytes, sizeof bytes);
  return {bytes, count > 0 ? static_cast<size_t>(count) : 0};
}

std::string printed_to_pipe(int steps) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  {
    const auto bar = progress_bar(ends[1]);
    for (int step = 1; step <= steps; ++step) bar->show({.step = step, .steps = steps, .loss = 1});
  }
  ::close(ends[1]);
  std::string all = read_some(ends[0]);
  ::close(ends[0]);
  return all;
}

std::string drawn_on_terminal(int columns) {
  winsize size{.ws_row = 24, .ws_col = static_cast<unsigned short>(columns), .ws_xpixel = 0, .ws_ypixel = 0};
  int ours, theirs;
  EXPECT_EQ(::openpty(&ours, &theirs, nullptr, nullptr, &size), 0);
  progress_bar(theirs)->show(kHalf);
  std::string all = read_some(ours);
  ::close(theirs);
  ::close(ours);
  return all;
}

TEST(ProgressBar, ShowsEverythingThatFits) {
  EXPECT_EQ(
      bar_line(kHalf, {.columns = 120}),
      "step 50/100 ===============---------------  loss 2.3457  1:23 left  3,421 tokens/s  210 MiB/rank  exposed 1.2 %");
  EXPECT_EQ(bar_line(kHalf, {.columns = 60}), "step 50/100 ===========------------  loss 2.3457  1:23 left");
}

TEST(ProgressBar, NeverFillsTheLastColumn) {
  for (int columns = 1; columns <= 200; ++columns) {
    const std::string line = bar_line(kHalf, {.columns = columns});
    EXPECT_LT(static_cast<int>(line.size()), columns) << line;
    EXPECT_TRUE(columns < 40 || line.find("loss 2.3457") != std::string::npos) << line;
    EXPECT_TRUE(columns < 60 || line.find("1:23 left") != std::string::npos) << line;
  }
}

TEST(ProgressBar, BeginsEmptyAndEndsFull) {
  EXPECT_NE(bar_line({.step = 0, .steps = 10}, {.columns = 40}).find("0/10 -----"), std::string::npos);
  const std::string full = bar_line({.step = 10, .steps = 10}, {.columns = 40});
  EXPECT_NE(full.find("10/10 ====="), std::string::npos) << full;
  EXPECT_EQ(full.find("=-"), std::string::npos) << full;
}

TEST(ProgressBar, ColourOnlyWhereWanted) {
  EXPECT_EQ(bar_line(kHalf, {.columns = 120}).find('\033'), std::string::npos);
  EXPECT_NE(bar_line(kHalf, {.columns = 120, .coloured = true}).find("\033[32m===============\033[0m-"), std::string::npos);
}

TEST(ProgressBar, DrawsAnewOnATerminal) {
  const Variable term("TERM", "xterm"), locale("LC_ALL", "C"), no_colour("NO_COLOR", "1");
  EXPECT_EQ(drawn_on_terminal(70), "\r" + bar_line(kHalf, {.columns = 70}) + "\033[K\r\n");
  const Variable unicode("LC_ALL", "C.UTF-8");
  EXPECT_EQ(drawn_on_terminal(70), "\r" + bar_line(kHalf, {.columns = 70, .unicode = true}) + "\033[K\r\n");
}

TEST(ProgressBar, PrintsLinesOnADumbTerminal) {
  const Variable term("TERM", "dumb");
  EXPECT_EQ(drawn_on_terminal(70), plain_line(kHalf) + "\r\n");
}

TEST(ProgressBar, PrintsALineForEachTenthElsewhere) {
  const std::string all = printed_to_pipe(1000);
  EXPECT_EQ(std::count(all.begin(), all.end(), '\n'), 11) << all;
  EXPECT_EQ(all.find('\r'), std::string::npos);
  EXPECT_EQ(all.find('\033'), std::string::npos);
  EXPECT_EQ(all.find("step 1/1000 (0 %)  loss 1.0000"), 0u) << all;
  EXPECT_NE(all.find("\nstep 1000/1000 (100 %)"), std::string::npos) << all;
  EXPECT_EQ(all.back(), '\n');
}

TEST(ProgressBar, PlainLineHasItAll) {
  EXPECT_EQ(plain_line(kHalf), "step 50/100 (50 %)  loss 2.3457  3,421 tokens/s  210 MiB a rank  exposed 1.2 %  1:23 left");
}

TEST(ProgressBar, BreaksALongSilence) {
  Milestones milestones;
  const auto start = Milestones::Clock::now();
  EXPECT_TRUE(milestones.due(1, 1000, start));
  EXPECT_FALSE(milestones.due(2, 1000, start + seconds(9)));
  EXPECT_TRUE(milestones.due(3, 1000, start + seconds(10)));
  EXPECT_FALSE(milestones.due(4, 1000, start + seconds(11)));
  EXPECT_TRUE(milestones.due(100, 1000, start + seconds(12)));
  EXPECT_TRUE(milestones.due(1000, 1000, start + seconds(13)));
}

}  // namespace
}  // namespace tessera::cli
