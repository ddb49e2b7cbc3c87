#include "tessera/layout/layout.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

constexpr int64_t kMost = int64_t{1} << 56;  // elements of a unit, so that its bytes and padding can be counted, too

int64_t elements_of(const NamedShape& parameter) {
  int64_t numel = 1;
  for (const int64_t size : parameter.shape) {
    if (size < 0) throw ConfigError(text("parameter '", parameter.name, "' has a dimension of negative size ", size));
    if (__builtin_mul_overflow(numel, size, &numel))
      throw ConfigError(text("parameter '", parameter.name, "' has more than 2^63 elements"));
  }
  return numel;
}

void check_kind(const LayoutKind& kind) {
  if (kind.rule == LayoutKind::Rule::block && kind.argument < 1)
    throw ConfigError(text("a layout by blocks needs blocks of at least 1 element, not ", kind.argument));
}

}  // namespace

Interval intersect(Interval a, Interval b) {
  const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? Interval{} : both;
}

int64_t count_of(const std::vector<Run>& runs) {
  int64_t count = 0;
  for (const Run& run : runs) count += run.count;
  return count;
}

std::vector<Run> clip(const std::vector<Run>& runs, Interval local) {
  std::vector<Run> clipped;
  for (const Run& run : runs) {
    const Interval common = intersect({run.local, run.local + run.count}, local);
    if (!common.empty()) clipped.push_back({run.begin + common.begin - run.local, common.size(), common.begin});
  }
  return clipped;
}

std::string name_of(const LayoutKind& kind) {
  switch (kind.rule) {
    case LayoutKind::Rule::flat:
      return "flat";
    case LayoutKind::Rule::per_parameter:
      return text("per_parameter(", kind.argument, ")");
    case LayoutKind::Rule::block:
      return text("block(", kind.argument, ")");
    case LayoutKind::Rule::whole_parameters:
      return "whole_parameters";
  }
  return "?";
}

Layout::Layout(std::span<const NamedShape> shapes, const LayoutKind& kind, int ranks, int64_t element_size, Bytes alignment)
    : kind_(kind), element_size_(element_size) {
  if (ranks < 1) throw ConfigError(text("a layout needs at least 1 rank, not ", ranks));
  if (element_size < 1 || alignment.value < element_size || alignment.value % element_size != 0)
    throw ConfigError(text("an alignment of ", alignment.value, " bytes is no multiple of an element's ", element_size));
  check_kind(kind);
  grain_ = alignment.value / element_size;
  for (const auto& parameter : shapes) {
    const int64_t numel = elements_of(parameter);
    if (numel > kMost - end_)
      throw ConfigError(text("with parameter '", parameter.name, "' the unit has more than 2^56 elements"));
    offsets_.push_back(end_);
    shapes_.push_back(parameter.shape);
    rows_.push_back(rows_of(parameter, kind));
    real_ += numel;
    end_ = round_up(end_ + numel, grain_);
  }
  total_ = kind.rule == LayoutKind::Rule::flat ? round_up((end_ + ranks - 1) / ranks, grain_) * ranks : end_;
}

Layout::Rows Layout::rows_of(const NamedShape& parameter, const LayoutKind& kind) {
  const auto dims = static_cast<int64_t>(parameter.shape.size());
  Rows rows;
  if (dims == 0) return rows;
  int64_t dim = 0;
  if (kind.rule == LayoutKind::Rule::per_parameter) {
    dim = std::min(kind.argument, dims - 1);
    if (dim < 0) dim = std::max<int64_t>(0, dims + dim);
  }
  rows.dim = static_cast<size_t>(dim);
  for (size_t d = 0; d < parameter.shape.size(); ++d)
    (d < rows.dim ? rows.outer : d == rows.dim ? rows.rows : rows.inner) *= parameter.shape[d];
  return rows;
}

Interval Layout::rows_in(ParameterIndex p, int part, int parts) const {
  const int64_t rows = rows_[p].rows, each = (rows + parts - 1) / parts;
  return {std::min(rows, each * part), std::min(rows, each * (part + 1))};
}

int64_t Layout::packed_rows(ParameterIndex p, int part, int parts) const {
  return round_up(rows_[p].outer * rows_in(p, part, parts).size() * rows_[p].inner, grain_);
}

int64_t Layout::cut(int part, int parts) const {
  if (kind_.rule == LayoutKind::Rule::flat) return total_ / parts * part;
  if (part == parts) return total_;
  const int64_t wanted = (end_ * part + parts - 1) / parts;
  const auto next = std::upper_bound(offsets_.begin(), offsets_.end(), wanted);
  if (next == offsets_.begin()) return 0;
  const auto p = static_cast<size_t>(next - offsets_.begin()) - 1;
  const int64_t numel = numel_of(p), behind = next == offsets_.end() ? end_ : *next;
  const int64_t piece = kind_.rule == LayoutKind::Rule::block ? kind_.argument : std::max<int64_t>(1, numel);
  const int64_t at = offsets_[p] + (wanted - offsets_[p] + piece - 1) / piece * piece;
  return at >= offsets_[p] + numel ? (wanted == offsets_[p] ? wanted : behind) : at;
}

std::vector<Run> Layout::row_runs(ParameterIndex p, int part, int parts) const {
  const Rows& shape = rows_[p];
  const Interval rows = rows_in(p, part, parts);
  int64_t local = 0;
  for (ParameterIndex before = 0; before < p; ++before) local += packed_rows(before, part, parts);
  const int64_t count = rows.size() * shape.inner;
  if (count * shape.outer == 0) return {};
  if (rows.size() == shape.rows) return {{0, numel_of(p), local}};
  std::vector<Run> runs;
  for (int64_t o = 0; o < shape.outer; ++o)
    runs.push_back({(o * shape.rows + rows.begin) * shape.inner, count, local + o * count});
  return runs;
}

std::vector<Run> Layout::runs(ParameterIndex p, int part, int parts) const {
  if (by_rows()) return row_runs(p, part, parts);
  const int64_t begin = cut(part, parts);
  const Interval common = intersect({offsets_[p], offsets_[p] + numel_of(p)}, {begin, cut(part + 1, parts)});
  if (common.empty()) return {};
  return {{common.begin - offsets_[p], common.size(), common.begin - begin}};
}

std::vector<int64_t> Layout::shard_shape(ParameterIndex p, int part, int parts) const {
  const int64_t count = count_of(runs(p, part, parts));
  if (count == numel_of(p) && !(by_rows() && count == 0)) return shapes_[p];
  if (!by_rows() || shapes_[p].empty()) return {count};
  auto shape = shapes_[p];
  shape[rows_[p].dim] = rows_in(p, part, parts).size();
  return shape;
}

Numel Layout::shard(int part, int parts) const {
  if (!by_rows()) return Numel(cut(part + 1, parts) - cut(part, parts));
  int64_t elements = 0;
  for (ParameterIndex p = 0; p < parameters(); ++p) elements += packed_rows(p, part, parts);
  return Numel(elements);
}

Numel Layout::largest_shard(int parts) const {
  Numel largest;
  for (int part = 0; part < parts; ++part) largest = std::max(largest, shard(part, parts));
  return largest;
}

double Layout::real_share(int part, int parts) const {
  if (total_ == 0) return 1;
  if (kind_.rule == LayoutKind::Rule::flat) return static_cast<double>(real_) / static_cast<double>(total_);
  const int64_t held = shard(part, parts).value;
  if (held == 0) return 1;
  int64_t real = 0;
  for (ParameterIndex p = 0; p < parameters(); ++p) real += count_of(runs(p, part, parts));
  return static_cast<double>(real) / static_cast<double>(held);
}

}  // namespace tessera
