#include "cli/rank_output.h"

#include <iterator>

#include "tessera/base/environment.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

constexpr size_t kLongestLine = 64 << 10;
constexpr size_t kTailLines = 20;
constexpr size_t kTailBytes = 2000;

/// The largest count ≤ `most` after which `line` may be cut without splitting a UTF-8 character.
size_t cut_before(std::string_view line, size_t most) {
  if (line.size() <= most) return line.size();
  size_t cut = most;
  while (cut > most - 4 && (static_cast<unsigned char>(line[cut]) & 0xC0) == 0x80) --cut;
  return cut;
}

}  // namespace

void LineCutter::feed(std::string_view bytes, Clock::time_point now) {
  while (!bytes.empty()) {
    const size_t end = bytes.find_first_of("\r\n");
    if (end != 0) append(bytes.substr(0, end), now);
    if (end == std::string_view::npos) return;
    if (bytes[end] == '\r') {
      returned_ = true;
    } else {
      emit_(line_);
      line_.clear();
      returned_ = false;
    }
    bytes.remove_prefix(end + 1);
  }
}

void LineCutter::append(std::string_view part, Clock::time_point now) {
  if (returned_) start_over(now);
  line_ += part;
  if (line_.size() > kLongestLine) emit_pieces();
}

void LineCutter::start_over(Clock::time_point now) {
  returned_ = false;
  if (!line_.empty() && now - last_redraw_ >= std::chrono::seconds(1)) {
    emit_(line_);
    last_redraw_ = now;
  }
  line_.clear();
}

void LineCutter::emit_pieces() {
  size_t start = 0;
  while (line_.size() - start > kLongestLine) {
    const std::string_view rest = std::string_view(line_).substr(start);
    const size_t cut = cut_before(rest, kLongestLine);
    emit_(rest.substr(0, cut));
    start += cut;
  }
  line_.erase(0, start);
}

void LineCutter::finish() {
  if (!line_.empty()) emit_(line_);
  line_.clear();
}

void Tail::add(std::string_view line) {
  const size_t cut = cut_before(line, kTailBytes);
  std::string kept;
  if (lines_.size() == kTailLines) {  // its memory serves again: this runs for every line of every rank
    kept = std::move(lines_.front());
    lines_.pop_front();
  }
  kept.assign(line.substr(0, cut));
  if (cut < line.size()) kept += "…";
  lines_.push_back(std::move(kept));
}

std::string rank_prefix(int rank, bool coloured) {
  static constexpr int kColours[] = {36, 33, 35, 32, 34, 96, 93, 95, 92, 94};
  if (!coloured) return text("[rank ", rank, "] ");
  return text("\033[", kColours[static_cast<size_t>(rank) % std::size(kColours)], "m[rank ", rank, "]\033[0m ");
}

bool colour_wanted() { return !environment("NO_COLOR") && environment("TERM").value_or("dumb") != "dumb"; }

}  // namespace tessera::cli
