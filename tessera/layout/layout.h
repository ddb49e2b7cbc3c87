#pragma once

#include <span>
#include <string>
#include <vector>

#include "tessera/base/types.h"

namespace tessera {

/// A parameter's full dotted name and its global shape; an empty shape is one element.
struct NamedShape {
  std::string name;
  std::vector<int64_t> shape;
};

/// Index of a parameter in its unit.
using ParameterIndex = size_t;

/// Half-open range of elements; empty if begin == end.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  constexpr int64_t size() const { return end - begin; }
  constexpr bool empty() const { return end <= begin; }
  constexpr bool operator==(const Interval&) const = default;
};

/// Common elements of both.
Interval intersect(Interval a, Interval b);

/// Which elements of a unit each rank owns. Pure arithmetic: no process, no storage.
/// The unit is one buffer of `total()` elements: parameters one after another, then padding; rank r owns chunk r.
class Layout {
 public:
  /// Packs `shapes` in order, each start aligned to `alignment`, and pads the whole to `ranks` equal chunks whose size is a
  /// multiple of `alignment`. Throws ConfigError naming the parameter if one has a negative dimension, or if `alignment` is
  /// no multiple of `element_size`. O(parameters).
  static Layout flat(std::span<const NamedShape> shapes, int ranks, int64_t element_size, Bytes alignment = Bytes{64});

  int ranks() const { return ranks_; }
  size_t parameters() const { return offsets_.size(); }

  /// Elements of parameter `p` that `rank` owns, as an interval of p's row-major order.
  Interval owned(ParameterIndex p, Rank rank) const;
  /// Elements of parameter `p` inside `range`, a range of the unit's buffer, as an interval of p's row-major order.
  Interval within(ParameterIndex p, Interval range) const;

  Numel numel(ParameterIndex p) const { return Numel(numels_[p]); }
  Numel offset(ParameterIndex p) const { return Numel(offsets_[p]); }  ///< first element of `p` in the unit's buffer
  Interval chunk_of(Rank rank) const { return {chunk_ * rank.value, chunk_ * (rank.value + 1)}; }  ///< in the unit's buffer
  Interval everything() const { return {0, chunk_ * ranks_}; }
  Numel chunk() const { return Numel(chunk_); }           ///< elements per rank, padding included
  Numel total() const { return Numel(chunk_ * ranks_); }  ///< elements of the unit's buffer, padding included
  Numel real() const { return Numel(real_); }             ///< elements that belong to a parameter
  Numel padding() const { return total() - real(); }      ///< elements that belong to none
  int64_t element_size() const { return element_size_; }  ///< bytes

 private:
  int ranks_ = 1;
  int64_t element_size_ = 4;
  int64_t chunk_ = 0;
  int64_t real_ = 0;
  std::vector<int64_t> offsets_;
  std::vector<int64_t> numels_;
};

}  // namespace tessera
