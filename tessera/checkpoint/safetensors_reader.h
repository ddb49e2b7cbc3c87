#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/layout/layout.h"

namespace tessera {

/// Reads runs of elements of tensors in files: in the order of the files, at most 8 MiB at once, as one call where runs lie
/// side by side (of different tensors, too), or where between two of one tensor there are at most 16 KiB, which cost less to
/// read than a call does.
class SafetensorsReader {
 public:
  /// Elements of `entry` in row-major order, runs in order; an element of c64 counts as two.
  struct Source {
    SafetensorsSet::Entry entry;
    std::vector<Run> runs;
  };
  /// `count` elements of source number `source`, of which `first` came before, at `data`, aligned for their type.
  using Take = std::function<void(size_t source, int64_t first, int64_t count, std::byte* data)>;

  SafetensorsReader(const SafetensorsSet& files, std::vector<Source> sources);

  Bytes wanted() const;  ///< of all runs
  /// Reads on until `bytes` bytes are read, or all. Throws DataError as SafetensorsFile::read, and what `take` throws.
  void read(Bytes bytes, const Take& take);

  Bytes read_bytes() const { return read_bytes_; }
  int64_t reads() const { return reads_; }

 private:
  struct Piece {
    size_t source;
    int64_t first, count, at;  // at: bytes from the start of the window
  };
  bool read_window(const Take& take);
  bool joins(const Piece& last, int64_t begin, int64_t end, int64_t place) const;
  void hand_on(const Take& take);
  int64_t element(size_t source) const;

  const SafetensorsSet& files_;
  std::vector<Source> sources_;
  std::vector<size_t> order_;  // of sources, by place
  std::unique_ptr<std::byte[]> window_;
  std::vector<Piece> pieces_;  // in the window
  // What comes next: of order_, of that source's runs, of that run's elements; elements of that source before it.
  size_t source_ = 0, run_ = 0;
  int64_t in_run_ = 0, first_ = 0;
  Bytes read_bytes_;
  int64_t reads_ = 0;
};

}  // namespace tessera
