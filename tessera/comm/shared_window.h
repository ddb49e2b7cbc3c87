#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "tessera/comm/parameter_window.h"
#include "tessera/comm/segment.h"

namespace tessera {

/// A unit's parameters in shared memory: one copy for all ranks, or one replica a rank from which peers take their chunks.
class SharedWindow final : public ParameterWindow {
 public:
  SharedWindow(const std::shared_ptr<Segment>& segment, const std::string& label, Bytes bytes, bool one_copy);

  std::byte* data() const override { return replica(segment_->rank()); }
  Bytes bytes() const override { return bytes_; }
  void publish(uint32_t epoch) override;
  std::chrono::nanoseconds gather(uint32_t epoch, std::string_view unit, int64_t step) override;

 private:
  struct alignas(64) Published {
    std::atomic<uint32_t> epoch;
  };
  std::byte* replica(Rank rank) const { return memory_.data() + rank.value * stride_; }
  Published* published() const { return reinterpret_cast<Published*>(control_.data()); }

  std::shared_ptr<Segment> segment_;
  Bytes bytes_;
  int64_t stride_;  ///< bytes from one rank's replica to the next; 0 for one copy
  SharedBlock control_;
  SharedBlock memory_;
  uint32_t held_ = 0;  ///< epoch of the chunks that this rank's replica holds
};

}  // namespace tessera
