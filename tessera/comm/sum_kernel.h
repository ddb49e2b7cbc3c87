#pragma once

#include <cstdint>
#include <span>

namespace tessera {

/// Element types that gradients, parameters and optimizer state are kept in.
enum class Element : uint8_t { float32, float64, bfloat16, float16 };

/// Bytes of one element.
int64_t size_of(Element element);

/// The ranks' copies of one gradient interval: `sources[r]` is rank r's first element.
struct SumSources {
  std::span<const void* const> sources;
  Element element;
};

/// What a sum found on its way.
struct SumResult {
  /// Σ x² over the results, in double, in an order that depends only on their number. Not finite if any of them is not; of
  /// fp64 results it may overflow, too.
  double squares = 0;
};

/// out[i] = scale · (sources[0][i] + sources[1][i] + …) + (accumulate ? out[i] : 0) for i in [0, count), where `squares` are
/// those of what was stored. An empty `sources` sums to zero.
///
/// Sums in the order of `sources`, in fp32 (fp64 where the sources or `out` are), with `scale` rounded to that type, and
/// rounds the result once, to nearest even, to `out_element`. A NaN stays one. The bits of an element depend neither on its
/// position, nor on how an interval is cut into calls, nor on the CPU's vector instructions, nor on the number of threads.
///
/// Addresses need no alignment but an element's own. `out` may be one of the sources if it has their element type; otherwise
/// it must not overlap them. It is fastest when all are 64-byte aligned. Runs on at::get_num_threads() threads.
/// O(count · sources).
SumResult sum_sources(const SumSources& from, double scale, bool accumulate, void* out, Element out_element, int64_t count);

}  // namespace tessera
