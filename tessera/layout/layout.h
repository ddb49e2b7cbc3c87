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

/// Consecutive elements of one parameter (row-major order) that one part has, and where they begin in the part's packed
/// shard, in elements.
struct Run {
  int64_t begin;
  int64_t count;
  int64_t local;

  constexpr bool operator==(const Run&) const = default;
};

int64_t count_of(const std::vector<Run>& runs);  ///< Σ count

/// Those elements of `runs` whose place in the packed shard lies in `local`.
std::vector<Run> clip(const std::vector<Run>& runs, Interval local);

/// A rule that divides a unit's elements into parts. A value.
struct LayoutKind {
  enum class Rule : uint8_t { flat, per_parameter, block, whole_parameters };
  Rule rule = Rule::flat;
  int64_t argument = 0;  ///< per_parameter: the dim; block: the elements

  bool operator==(const LayoutKind&) const = default;
};

/// Parameters one after another, the whole padded to equal chunks: one contiguous piece a rank (ZeRO; FSDP1).
constexpr LayoutKind flat() { return {}; }
/// Every parameter is split along `dim` (negative: from the last), ⌈size/parts⌉ rows a part, empty shards legal (FSDP2's
/// Shard(dim)). A parameter with fewer dims is split along its last; one without dims belongs to the first part.
constexpr LayoutKind per_parameter(int64_t dim = 0) { return {LayoutKind::Rule::per_parameter, dim}; }
/// As flat, but cut only at starts of parameters and multiples of `elements` inside them: for state that is kept by block.
constexpr LayoutKind block(int64_t elements) { return {LayoutKind::Rule::block, elements}; }
/// As flat, but cut only at starts of parameters: for optimizers that need whole matrices.
constexpr LayoutKind whole_parameters() { return {LayoutKind::Rule::whole_parameters, 0}; }

/// "flat", "per_parameter(0)", "block(128)", "whole_parameters".
std::string name_of(const LayoutKind& kind);

/// Which elements of a unit each part has. Pure arithmetic: no process, no storage.
/// The unit is one buffer of `total()` elements: parameters one after another, each start aligned, then padding.
class Layout {
 public:
  Layout() = default;

  /// Lays `shapes` out in order, each start aligned to `alignment`. A flat layout is padded to `ranks` equal chunks whose
  /// size is a multiple of `alignment`. Throws ConfigError naming the parameter if one has a negative dimension, or if
  /// `alignment` is no multiple of `element_size`. O(parameters).
  Layout(std::span<const NamedShape> shapes, const LayoutKind& kind, int ranks, int64_t element_size,
         Bytes alignment = Bytes{64});

  size_t parameters() const { return offsets_.size(); }

  /// Elements of parameter `p` in part `part` of `parts` equal parts, where `parts` divides the ranks that the layout was
  /// made for; in order. O(parameters + runs).
  std::vector<Run> runs(ParameterIndex p, int part, int parts) const;
  /// The shape in which those are shown: the parameter's with a shorter dim where it is split along one, the parameter's if
  /// they are all of it, else one dim.
  std::vector<int64_t> shard_shape(ParameterIndex p, int part, int parts) const;
  /// Elements of the packed shard of a part, padding included.
  Numel shard(int part, int parts) const;
  Numel largest_shard(int parts) const;
  /// Of the packed shard, the fraction that belongs to parameters; the padding of a flat layout counts evenly for all.
  double real_share(int part, int parts) const;

  const std::vector<int64_t>& shape(ParameterIndex p) const { return shapes_[p]; }
  Numel numel(ParameterIndex p) const { return Numel(numel_of(p)); }
  Numel offset(ParameterIndex p) const { return Numel(offsets_[p]); }  ///< first element of `p` in the unit's buffer
  Numel total() const { return Numel(total_); }                        ///< elements of the unit's buffer, padding included
  Numel real() const { return Numel(real_); }                          ///< elements that belong to a parameter
  Numel padding() const { return total() - real(); }                   ///< elements that belong to none
  int64_t element_size() const { return element_size_; }               ///< bytes
  int64_t grain() const { return grain_; }                             ///< elements that starts are aligned to

 private:
  /// A parameter seen as outer × rows × inner, split by rows.
  struct Rows {
    int64_t outer = 1, rows = 1, inner = 1;
    size_t dim = 0;
  };
  bool by_rows() const { return kind_.rule == LayoutKind::Rule::per_parameter; }
  int64_t numel_of(ParameterIndex p) const { return rows_[p].outer * rows_[p].rows * rows_[p].inner; }
  static Rows rows_of(const NamedShape& parameter, const LayoutKind& kind);
  Interval rows_in(ParameterIndex p, int part, int parts) const;
  int64_t packed_rows(ParameterIndex p, int part, int parts) const;  // elements in the packed shard, padding included
  int64_t cut(int part, int parts) const;  // where a part begins in the unit's buffer, if parts are contiguous
  std::vector<Run> row_runs(ParameterIndex p, int part, int parts) const;

  LayoutKind kind_;
  int64_t element_size_ = 4;
  int64_t grain_ = 16;
  int64_t end_ = 0;  // of the last parameter, aligned
  int64_t total_ = 0;
  int64_t real_ = 0;
  std::vector<int64_t> offsets_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<Rows> rows_;
};

}  // namespace tessera
