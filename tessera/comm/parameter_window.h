#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tessera/base/types.h"

namespace tessera {

/// Who reads which copy of a unit's parameters, and what has to be fetched into this rank's copy.
struct WindowPlan {
  struct Piece {
    Rank owner;  ///< of another copy
    int64_t begin, bytes;
  };
  int copies = 1;
  std::vector<int> copy_of;                 ///< by rank
  std::vector<std::vector<Piece>> fetches;  ///< in as many parts as ranks share a copy, or none if nothing is ever fetched
  int first = 0;                            ///< the part that this rank fetches first
};

/// One unit's parameters: a buffer of which each rank owns a part, in one copy or several. Owners publish a new version of
/// their part as an epoch; a reader waits for the epoch it needs from every owner. One-sided: a rank that never reads hangs
/// nobody. Ranks that share a copy divide what must be fetched into it among those that are there. An owner may write epoch
/// e + 1 only when every rank is done reading epoch e, which is the caller's to know.
class ParameterWindow {
 public:
  virtual ~ParameterWindow() = default;

  virtual std::byte* data() const = 0;  ///< the whole buffer, as this rank sees it
  virtual Bytes bytes() const = 0;

  /// This rank's part holds epoch `epoch` from now on.
  virtual void publish(uint32_t epoch) = 0;

  /// As much of a gather as needs no waiting. Returns whether that was all of it.
  virtual bool prefetch(uint32_t epoch) = 0;

  /// Makes `data()` hold epoch `epoch` of every part. Returns the time spent on waiting and copying. Throws PeerError.
  virtual std::chrono::nanoseconds gather(uint32_t epoch, std::string_view unit, int64_t step) = 0;
};

}  // namespace tessera
