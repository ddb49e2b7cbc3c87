#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {

/// A run of consecutive granules: [begin, begin + count).
struct GranuleRange {
  uint32_t begin = 0;
  uint32_t count = 0;
  uint32_t end() const { return begin + count; }
  bool operator==(const GranuleRange&) const = default;
};

/// The free parts of an address space, as disjoint ranges in address order; neighbours are merged at once. Pure: holds
/// indices, touches no memory but its own. A treap whose nodes know the largest range below them, so that the lowest range
/// that fits is found in O(log ranges). Nodes are recycled: nothing is allocated unless there are more ranges than ever
/// before.
class FreeRanges {
 public:
  /// All of [0, size) is free.
  explicit FreeRanges(uint32_t size);

  /// Takes `count` > 0 granules from the front of the lowest range that has them; nothing if none has. O(log ranges).
  std::optional<uint32_t> take(uint32_t count);

  /// Gives `range` (not empty, all of it taken before) back. O(log ranges).
  void insert(GranuleRange range);

  /// All ranges by rising address, into `result` (cleared first, so that a caller can reuse its memory). O(ranges).
  void list(std::vector<GranuleRange>& result) const;

 private:
  using Index = uint32_t;
  static constexpr Index kNone = 0;  // nodes_[0] stands for "no node": no granules, none below
  struct Node {
    GranuleRange range;
    uint32_t largest = 0;  // most granules of any range in this subtree
    uint32_t priority = 0;
    Index left = kNone, right = kNone;
  };

  void refresh(Node& node) const;
  uint32_t take_below(Index& link, uint32_t count);
  void add(Index& link, Index node);
  void replace(Index link, uint32_t begin, GranuleRange by);
  void erase(Index& link, uint32_t begin);
  void split(Index tree, uint32_t at, Index& left, Index& right);
  Index join(Index left, Index right);
  Index fresh_node(GranuleRange range);
  void list_below(Index link, std::vector<GranuleRange>& result) const;

  std::vector<Node> nodes_;
  std::vector<Index> recycled_;
  Index root_ = kNone;
  uint32_t random_ = 2463534242;
};

}  // namespace tessera
