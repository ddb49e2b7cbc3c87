#include "cli/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "cli/rank_output.h"
#include "cli/readable.h"
#include "tessera/base/environment.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

constexpr int kShortestBar = 10, kLongestBar = 30;
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::seconds kLongestSilence{10};

double done_part(const TrainProgress& progress) {
  if (progress.steps <= 0) return 1;
  return std::clamp(static_cast<double>(progress.step) / static_cast<double>(progress.steps), 0.0, 1.0);
}

std::string percent(double part, int digits) { return text(fixed(part * 100, digits), " %"); }

void put(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;  // nobody watches any more; training goes on
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

bool unicode_terminal() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"})
    if (const auto locale = environment(name))
      return locale->find("UTF-8") != std::string::npos || locale->find("utf8") != std::string::npos;
  return false;
}

int columns_of(int descriptor) {
  winsize size{};
  if (::ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

std::string drawn_bar(double part, int width, const BarStyle& style) {
  const int full = static_cast<int>(part * width);
  std::string done, rest;
  for (int i = 0; i < full; ++i) done += style.unicode ? "━" : "=";
  for (int i = full; i < width; ++i) rest += style.unicode ? "─" : "-";
  if (!style.coloured) return done + rest;
  return text("\033[32m", done, "\033[0m", rest);
}

class TerminalBar final : public ProgressBar {
 public:
  explicit TerminalBar(int descriptor)
      : descriptor_(descriptor), style_{.unicode = unicode_terminal(), .coloured = colour_wanted()} {}
  ~TerminalBar() override {
    if (drawn_) put(descriptor_, "\n");
  }

  void show(const TrainProgress& progress) override {
    const auto now = std::chrono::steady_clock::now();
    if (drawn_ && progress.step < progress.steps && now - last_ < kRedraw) return;
    style_.columns = columns_of(descriptor_);  // a window may change its size
    put(descriptor_, text("\r", bar_line(progress, style_), "\033[K"));
    drawn_ = true;
    last_ = now;
  }

 private:
  int descriptor_;
  BarStyle style_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

class PlainLines final : public ProgressBar {
 public:
  explicit PlainLines(int descriptor) : descriptor_(descriptor) {}

  void show(const TrainProgress& progress) override {
    if (milestones_.due(progress.step, progress.steps, Milestones::Clock::now()))
      put(descriptor_, plain_line(progress) + "\n");
  }

 private:
  int descriptor_;
  Milestones milestones_;
};

}  // namespace

std::string bar_line(const TrainProgress& progress, const BarStyle& style) {
  const std::string start = text("step ", progress.step, "/", progress.steps, " ");
  std::string end = text("  loss ", fixed(progress.loss, 4));
  const std::vector<std::string> more{text("  ", clock_time(progress.seconds_left), " left"),
                                      text("  ", grouped(static_cast<int64_t>(progress.tokens_per_second)), " tokens/s"),
                                      text("  ", binary_size(progress.memory_bytes), "/rank"),
                                      text("  exposed ", percent(progress.exposed_share, 1))};
  const int room = std::max(style.columns - 1, 0);
  const auto left = [&](const std::string& rest) { return room - static_cast<int>(start.size() + rest.size()); };
  for (const auto& field : more) {
    if (left(end + field) < kShortestBar) break;
    end += field;
  }
  if (left(end) < kShortestBar) return (start + end.substr(1)).substr(0, static_cast<size_t>(room));
  return start + drawn_bar(done_part(progress), std::min(left(end), kLongestBar), style) + end;
}

std::string plain_line(const TrainProgress& progress) {
  return text("step ", progress.step, "/", progress.steps, " (", percent(done_part(progress), 0), ")  loss ",
              fixed(progress.loss, 4), "  ", grouped(static_cast<int64_t>(progress.tokens_per_second)), " tokens/s  ",
              binary_size(progress.memory_bytes), " a rank  exposed ", percent(progress.exposed_share, 1), "  ",
              clock_time(progress.seconds_left), " left");
}

bool Milestones::due(int64_t step, int64_t steps, Clock::time_point now) {
  const int64_t tenths = steps > 0 ? step * 10 / steps : 10;
  const bool due = tenths_ < 0 || tenths > tenths_ || step == steps || now - last_ >= kLongestSilence;
  if (!due) return false;
  tenths_ = tenths;
  last_ = now;
  return true;
}

std::unique_ptr<ProgressBar> progress_bar(int descriptor) {
  const bool drawable = ::isatty(descriptor) == 1 && environment("TERM").value_or("dumb") != "dumb";
  if (drawable) return std::make_unique<TerminalBar>(descriptor);
  return std::make_unique<PlainLines>(descriptor);
}

}  // namespace tessera::cli
