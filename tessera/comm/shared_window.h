#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "tessera/comm/parameter_window.h"
#include "tessera/comm/segment.h"

namespace tessera {

/// A unit's parameters in shared memory.
class SharedWindow final : public ParameterWindow {
 public:
  SharedWindow(const std::shared_ptr<Segment>& segment, const std::string& label, Bytes bytes, WindowPlan plan);

  std::byte* data() const override { return copy_of(segment_->rank()); }
  Bytes bytes() const override { return bytes_; }
  void publish(uint32_t epoch) override;
  bool prefetch(uint32_t epoch) override;
  std::chrono::nanoseconds gather(uint32_t epoch, std::string_view unit, int64_t step) override;

 private:
  struct alignas(64) Published {
    std::atomic<uint32_t> epoch;    // by rank: of its own part
    std::atomic<uint32_t> fetched;  // by copy and part: of what was fetched there
    std::atomic<uint64_t> claimed;  // by copy and part: epoch << 32 | the rank that fetches
  };
  bool written(Rank rank, uint32_t epoch) const {
    return published()[rank.value].epoch.load(std::memory_order_acquire) >= epoch;
  }
  std::chrono::nanoseconds fetch(uint32_t epoch, const Operation& operation);
  void fetch_unclaimed(uint32_t epoch);
  bool fetched(size_t part, uint32_t epoch) const {
    return part_of_copy(part).fetched.load(std::memory_order_acquire) >= epoch;
  }
  Published& part_of_copy(size_t part) const;
  int copy_index(Rank rank) const { return plan_.copy_of[static_cast<size_t>(rank.value)]; }
  std::byte* copy_of(Rank rank) const { return memory_.data() + copy_index(rank) * stride_; }
  bool shares_copy(Rank rank) const { return copy_index(rank) == copy_index(segment_->rank()); }
  Published* published() const { return reinterpret_cast<Published*>(control_.data()); }

  std::shared_ptr<Segment> segment_;
  Bytes bytes_;
  WindowPlan plan_;
  int64_t stride_;  ///< bytes from one copy to the next
  SharedBlock control_;
  SharedBlock memory_;
};

}  // namespace tessera
