#include "tessera/storage/free_ranges.h"

#include <algorithm>

namespace tessera {

FreeRanges::FreeRanges(uint32_t size) : nodes_(1) {
  if (size > 0) root_ = fresh_node({0, size});
}

std::optional<uint32_t> FreeRanges::take(uint32_t count) {
  if (nodes_[root_].largest < count) return std::nullopt;
  return take_below(root_, count);
}

void FreeRanges::insert(GranuleRange range) {
  Index before = kNone, after = kNone;  // the neighbours by address
  for (Index at = root_; at != kNone;) {
    const bool left = range.begin < nodes_[at].range.begin;
    (left ? after : before) = at;
    at = left ? nodes_[at].left : nodes_[at].right;
  }
  const GranuleRange low = nodes_[before].range, high = nodes_[after].range;
  const bool joins_low = before != kNone && low.end() == range.begin;
  const bool joins_high = after != kNone && range.end() == high.begin;
  if (joins_low && joins_high) {
    erase(root_, high.begin);
    replace(root_, low.begin, {low.begin, low.count + range.count + high.count});
  } else if (joins_low) {
    replace(root_, low.begin, {low.begin, low.count + range.count});
  } else if (joins_high) {
    replace(root_, high.begin, {range.begin, range.count + high.count});
  } else {
    const Index node = fresh_node(range);  // before a reference into nodes_ is taken: this may move them
    add(root_, node);
  }
}

void FreeRanges::list(std::vector<GranuleRange>& result) const {
  result.clear();
  list_below(root_, result);
}

void FreeRanges::refresh(Node& node) const {
  node.largest = std::max({node.range.count, nodes_[node.left].largest, nodes_[node.right].largest});
}

uint32_t FreeRanges::take_below(Index& link, uint32_t count) {
  Node& node = nodes_[link];
  uint32_t begin = 0;
  if (nodes_[node.left].largest >= count) {
    begin = take_below(node.left, count);
  } else if (node.range.count >= count) {
    begin = node.range.begin;
    node.range = {begin + count, node.range.count - count};
    if (node.range.count == 0) {
      recycled_.push_back(link);
      link = join(node.left, node.right);
      return begin;
    }
  } else {
    begin = take_below(node.right, count);
  }
  refresh(node);
  return begin;
}

void FreeRanges::add(Index& link, Index fresh) {
  Node& node = nodes_[link];
  Node& added = nodes_[fresh];
  if (link == kNone || added.priority > node.priority) {
    split(link, added.range.begin, added.left, added.right);
    link = fresh;
  } else {
    add(added.range.begin < node.range.begin ? node.left : node.right, fresh);
  }
  refresh(nodes_[link]);
}

void FreeRanges::replace(Index link, uint32_t begin, GranuleRange by) {
  Node& node = nodes_[link];
  if (node.range.begin == begin) {
    node.range = by;
  } else {
    replace(begin < node.range.begin ? node.left : node.right, begin, by);
  }
  refresh(node);
}

void FreeRanges::erase(Index& link, uint32_t begin) {
  Node& node = nodes_[link];
  if (node.range.begin == begin) {
    recycled_.push_back(link);
    link = join(node.left, node.right);
  } else {
    erase(begin < node.range.begin ? node.left : node.right, begin);
    refresh(node);
  }
}

void FreeRanges::split(Index tree, uint32_t at, Index& left, Index& right) {
  if (tree == kNone) {
    left = right = kNone;
    return;
  }
  Node& node = nodes_[tree];
  if (node.range.begin < at) {
    left = tree;
    split(node.right, at, node.right, right);
  } else {
    right = tree;
    split(node.left, at, left, node.left);
  }
  refresh(node);
}

FreeRanges::Index FreeRanges::join(Index left, Index right) {
  if (left == kNone || right == kNone) return left == kNone ? right : left;
  const bool left_on_top = nodes_[left].priority > nodes_[right].priority;
  const Index top = left_on_top ? left : right;
  if (left_on_top) {
    nodes_[top].right = join(nodes_[top].right, right);
  } else {
    nodes_[top].left = join(left, nodes_[top].left);
  }
  refresh(nodes_[top]);
  return top;
}

FreeRanges::Index FreeRanges::fresh_node(GranuleRange range) {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 17;
  random_ ^= random_ << 5;
  Index index = static_cast<Index>(nodes_.size());
  if (recycled_.empty()) {
    nodes_.emplace_back();
    recycled_.reserve(nodes_.capacity());  // giving a node back must not allocate
  } else {
    index = recycled_.back();
    recycled_.pop_back();
  }
  nodes_[index] = Node{.range = range, .largest = range.count, .priority = random_};
  return index;
}

void FreeRanges::list_below(Index link, std::vector<GranuleRange>& result) const {
  if (link == kNone) return;
  list_below(nodes_[link].left, result);
  result.push_back(nodes_[link].range);
  list_below(nodes_[link].right, result);
}

}  // namespace tessera
