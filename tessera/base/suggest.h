#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// How many letters have to be inserted, removed, replaced or swapped with their neighbour to turn `a` into `b`
/// (Levenshtein's distance with transpositions, restricted to non-overlapping ones). O(|a| · |b|).
size_t edit_distance(std::string_view a, std::string_view b);

/// The candidate that a user who typed `word` most likely meant; nothing if none is near: more than a third of the letters
/// differ, and none begins with `word`. Leading dashes and letter case don't count, and `_` equals `-`. Of equally near
/// ones the first.
std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates);

/// What to append to an error about an unknown `word`: "; did you mean '--layers'?", or nothing if none is near.
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates);

}  // namespace tessera
