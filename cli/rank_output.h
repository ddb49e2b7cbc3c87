#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

/// Cuts the bytes of one stream into lines.
/// A carriage return starts the line over, as on a terminal: of a progress bar that redraws itself, the state being replaced
/// comes out as a line at most once a second, and the last state always does. A line longer than 64 KiB comes in pieces,
/// never cut inside a UTF-8 character.
class LineCutter {
 public:
  using Clock = std::chrono::steady_clock;
  using Emit = std::function<void(std::string_view line)>;  ///< gets a line without its end

  explicit LineCutter(Emit emit) : emit_(std::move(emit)) {}

  void feed(std::string_view bytes, Clock::time_point now);
  void finish();  ///< the stream has ended: a last line without an end comes out

 private:
  void append(std::string_view part, Clock::time_point now);
  void start_over(Clock::time_point now);
  void emit_pieces();

  Emit emit_;
  std::string line_;
  bool returned_ = false;  ///< a carriage return was seen; what follows it decides what it meant
  Clock::time_point last_redraw_{};
};

/// The last 20 lines that a rank printed, each cut after 2,000 bytes.
class Tail {
 public:
  void add(std::string_view line);
  std::vector<std::string> lines() const { return {lines_.begin(), lines_.end()}; }

 private:
  std::deque<std::string> lines_;
};

/// "[rank 3] ", coloured by rank on a terminal.
std::string rank_prefix(int rank, bool coloured);

/// Whether a terminal should get colour: not if NO_COLOR is set (https://no-color.org) or TERM is "dumb".
bool colour_wanted();

}  // namespace tessera::cli
