#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tessera {

/// Elements that one thread takes at a time: enough to be worth the handing out.
inline constexpr int64_t kChunk = 65536;

/// Calls `range(begin, end)` for each chunk of [0, count) on at::get_num_threads() threads (never nested) and adds what the
/// calls return in the order of the chunks: the sum does not depend on the number of threads or on their timing.
template <class Range>
double sum_over_chunks(int64_t count, const Range& range) {
  if (count <= kChunk) return count > 0 ? range(int64_t{0}, count) : 0.0;
  std::vector<double> partial(static_cast<size_t>((count + kChunk - 1) / kChunk));
  at::parallel_for(0, static_cast<int64_t>(partial.size()), /*grain_size=*/1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk)
      partial[static_cast<size_t>(chunk)] = range(chunk * kChunk, std::min(count, (chunk + 1) * kChunk));
  });
  double total = 0;
  for (const double part : partial) total += part;
  return total;
}

}  // namespace tessera
