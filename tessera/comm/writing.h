#pragma once

#include <cstdint>

namespace tessera {

/// How a kernel writes an array that it has not read: through the caches, or past them. The latter spares memory the reading
/// of every line that is about to be overwritten (a sum of two fp32 sources moves 12 bytes an element instead of 16), but
/// its next reader finds nothing in a cache.
enum class Writing : uint8_t { cached, streamed };

/// Streams what is too large to be found in a core's caches anyway.
inline Writing writing_of(int64_t bytes) { return bytes < (int64_t{1} << 20) ? Writing::cached : Writing::streamed; }

}  // namespace tessera
