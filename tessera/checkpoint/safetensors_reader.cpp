#include "tessera/checkpoint/safetensors_reader.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

namespace tessera {
namespace {

constexpr int64_t kWindow = 8 << 20, kGap = 16 << 10;  // bytes
constexpr size_t kMostPieces = 1 << 16;

}  // namespace

SafetensorsReader::SafetensorsReader(const SafetensorsSet& files, std::vector<Source> sources)
    : files_(files), sources_(std::move(sources)), order_(sources_.size()) {
  std::iota(order_.begin(), order_.end(), size_t{0});
  std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) {
    const auto place = [&](size_t s) { return std::pair(sources_[s].entry.file, sources_[s].entry.tensor->begin); };
    return place(a) < place(b);
  });
}

int64_t SafetensorsReader::element(size_t source) const {
  const FileType type = sources_[source].entry.tensor->type;
  return type == FileType::c64 ? bytes_of(type) / 2 : bytes_of(type);
}

Bytes SafetensorsReader::wanted() const {
  Bytes bytes;
  for (size_t s = 0; s < sources_.size(); ++s) bytes += Bytes(count_of(sources_[s].runs) * element(s));
  return bytes;
}

void SafetensorsReader::read(Bytes bytes, const Take& take) {
  if (!window_) window_ = std::make_unique_for_overwrite<std::byte[]>(kWindow);
  const Bytes end = read_bytes_ + bytes;
  while (read_bytes_ < end && read_window(take)) {
  }
}

// Does what lies at `place` of the next source belong to the window that holds [begin, end)?
bool SafetensorsReader::joins(const Piece& last, int64_t begin, int64_t end, int64_t place) const {
  const size_t next = order_[source_];
  const int64_t gap = place - end;
  return pieces_.size() < kMostPieces && sources_[next].entry.file == sources_[last.source].entry.file && gap >= 0 &&
         gap <= (next == last.source ? kGap : 0) && (place - begin) % element(next) == 0;
}

bool SafetensorsReader::read_window(const Take& take) {
  pieces_.clear();
  int64_t begin = 0, end = 0;
  while (source_ < order_.size()) {
    const size_t s = order_[source_];
    const Source& source = sources_[s];
    if (run_ == source.runs.size()) {
      ++source_;
      run_ = 0;
      first_ = 0;
      continue;
    }
    const Run& run = source.runs[run_];
    const int64_t size = element(s), place = source.entry.tensor->begin + (run.begin + in_run_) * size;
    if (pieces_.empty())
      begin = end = place;
    else if (!joins(pieces_.back(), begin, end, place))
      break;
    const int64_t count = std::min((kWindow - (place - begin)) / size, run.count - in_run_);
    if (count <= 0) break;
    pieces_.push_back({s, first_, count, place - begin});
    end = place + count * size;
    first_ += count;
    in_run_ += count;
    if (in_run_ < run.count) break;  // the window is full
    ++run_;
    in_run_ = 0;
  }
  if (pieces_.empty()) return false;
  const auto bytes = static_cast<size_t>(end - begin);
  files_.files()[sources_[pieces_[0].source].entry.file].read(begin, std::span(window_.get(), bytes));
  read_bytes_ += Bytes(end - begin);
  ++reads_;
  hand_on(take);
  return true;
}

// Moves what belongs to one source together, and hands it on.
void SafetensorsReader::hand_on(const Take& take) {
  for (size_t i = 0; i < pieces_.size();) {
    const Piece& start = pieces_[i];
    const int64_t size = element(start.source);
    std::byte* to = window_.get() + start.at;
    int64_t count = 0;
    for (; i < pieces_.size() && pieces_[i].source == start.source; ++i) {
      std::memmove(to + count * size, window_.get() + pieces_[i].at, static_cast<size_t>(pieces_[i].count * size));
      count += pieces_[i].count;
    }
    take(start.source, start.first, count, to);
  }
}

}  // namespace tessera
