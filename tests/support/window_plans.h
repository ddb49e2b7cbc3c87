#pragma once

#include "tessera/comm/parameter_window.h"

namespace tessera::test {

/// All ranks see one copy.
inline WindowPlan one_copy(int ranks) {
  return {.copies = 1, .copy_of = std::vector<int>(static_cast<size_t>(ranks), 0), .fetches = {}, .first = 0};
}

/// Each rank has a copy of `bytes` bytes, of which rank r owns the r-th of equal chunks, and fetches the others' chunks.
inline WindowPlan copy_each(int ranks, Rank me, int64_t bytes) {
  WindowPlan plan{.copies = ranks, .copy_of = {}, .fetches = {{}}, .first = 0};
  for (int r = 0; r < ranks; ++r) {
    plan.copy_of.push_back(r);
    if (r != me.value) plan.fetches[0].push_back({Rank(r), bytes / ranks * r, bytes / ranks});
  }
  return plan;
}

}  // namespace tessera::test
