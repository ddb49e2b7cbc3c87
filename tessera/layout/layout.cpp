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

}  // namespace

Interval intersect(Interval a, Interval b) {
  const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? Interval{} : both;
}

Layout Layout::flat(std::span<const NamedShape> shapes, int ranks, int64_t element_size, Bytes alignment) {
  if (ranks < 1) throw ConfigError(text("a layout needs at least 1 rank, not ", ranks));
  if (element_size < 1 || alignment.value < element_size || alignment.value % element_size != 0)
    throw ConfigError(text("an alignment of ", alignment.value, " bytes is no multiple of an element's ", element_size));
  Layout layout;
  layout.ranks_ = ranks;
  layout.element_size_ = element_size;
  const int64_t grain = alignment.value / element_size;
  int64_t end = 0;
  for (const auto& parameter : shapes) {
    const int64_t numel = elements_of(parameter);
    if (numel > kMost - end)
      throw ConfigError(text("with parameter '", parameter.name, "' the unit has more than 2^56 elements"));
    layout.offsets_.push_back(end);
    layout.numels_.push_back(numel);
    layout.real_ += numel;
    end = round_up(end + numel, grain);
  }
  layout.chunk_ = round_up((end + ranks - 1) / ranks, grain);
  return layout;
}

Interval Layout::within(ParameterIndex p, Interval range) const {
  const Interval common = intersect({offsets_[p], offsets_[p] + numels_[p]}, range);
  return common.empty() ? Interval{} : Interval{common.begin - offsets_[p], common.end - offsets_[p]};
}

Interval Layout::owned(ParameterIndex p, Rank rank) const { return within(p, chunk_of(rank)); }

}  // namespace tessera
