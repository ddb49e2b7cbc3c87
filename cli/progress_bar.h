#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "cli/train_loop.h"

namespace tessera::cli {

/// Shows how a run stands. What it has written is a whole line when it ends.
class ProgressBar {
 public:
  virtual ~ProgressBar() = default;
  virtual void show(const TrainProgress& progress) = 0;
};

/// What suits `descriptor`: on a terminal one line that is drawn anew, at most ten times a second and as wide as the
/// terminal; on anything else (or where TERM is "dumb") a line after the first and the last step and for every tenth of the
/// steps, and one when ten seconds have gone by without. Colour unless NO_COLOR is set. Never throws: a run goes on when
/// nobody can watch it.
std::unique_ptr<ProgressBar> progress_bar(int descriptor);

/// How a bar may look.
struct BarStyle {
  int columns = 80;  ///< of the terminal; the bar leaves the last one free
  bool unicode = false;
  bool coloured = false;
};

/// Step, bar, loss, and as much as fits of time left, tokens/s, memory, exposed communication.
std::string bar_line(const TrainProgress& progress, const BarStyle& style);

/// All of that in words, without a line end.
std::string plain_line(const TrainProgress& progress);

/// When a plain line is due.
class Milestones {
 public:
  using Clock = std::chrono::steady_clock;
  bool due(int64_t step, int64_t steps, Clock::time_point now);

 private:
  int64_t tenths_ = -1;  ///< that were done at the last line; −1: there was none
  Clock::time_point last_{};
};

}  // namespace tessera::cli
