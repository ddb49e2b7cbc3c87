#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tessera/base/types.h"

namespace tessera {

/// One unit's parameters over the ranks of an axis: a buffer of which rank r owns chunk r. Owners publish a new version of
/// their chunk as an epoch; a reader waits for the epoch it needs from every owner. One-sided: a rank that never reads hangs
/// nobody. An owner may write epoch e + 1 only when every rank is done reading epoch e, which is the caller's to know.
class ParameterWindow {
 public:
  virtual ~ParameterWindow() = default;

  virtual std::byte* data() const = 0;  ///< the whole buffer, as this rank sees it
  virtual Bytes bytes() const = 0;

  /// This rank's chunk holds epoch `epoch` from now on.
  virtual void publish(uint32_t epoch) = 0;

  /// Makes `data()` hold epoch `epoch` of every chunk. Returns the time spent on waiting and copying. Throws PeerError.
  virtual std::chrono::nanoseconds gather(uint32_t epoch, std::string_view unit, int64_t step) = 0;
};

}  // namespace tessera
