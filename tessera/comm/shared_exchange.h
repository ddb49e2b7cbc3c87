#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "tessera/comm/gradient_exchange.h"
#include "tessera/comm/segment.h"

namespace tessera {

/// Gradients handed over in shared memory: what travels are offsets into the segment.
class SharedExchange final : public GradientExchange {
 public:
  SharedExchange(const std::shared_ptr<Segment>& segment, const std::string& label, size_t parameters);

  void offer(size_t parameter, const void* gradient) override;
  void post(uint32_t round) override { announce(mine().posted, round); }
  bool posted(Rank rank, uint32_t round) const override { return reached(of(rank).posted, round); }
  const void* gradient(Rank rank, size_t parameter) const override { return address(offers(rank)[parameter]); }

  void offer_sum(size_t parameter, const void* sum) override;
  void post_sums(uint32_t round) override { announce(mine().summed, round); }
  bool sums_posted(Rank rank, uint32_t round) const override { return reached(of(rank).summed, round); }
  const void* sum(Rank rank, size_t parameter) const override { return address(offers(rank)[parameters_ + parameter]); }

  void finish(uint32_t round) override { announce(mine().finished, round); }
  bool finished(Rank rank, uint32_t round) const override { return reached(of(rank).finished, round); }

  std::chrono::nanoseconds wait_posted(uint32_t round, std::string_view unit, int64_t step) override;
  std::chrono::nanoseconds wait_sums(uint32_t round, std::string_view unit, int64_t step) override;
  std::chrono::nanoseconds wait_finished(uint32_t round, std::string_view unit, int64_t step) override;
  std::chrono::nanoseconds wait_posted_politely(uint32_t round, std::string_view unit, int64_t step) override;

 private:
  struct alignas(64) Counters {
    std::atomic<uint32_t> posted, summed, finished;
  };
  Counters& of(Rank rank) const { return reinterpret_cast<Counters*>(block_.data())[rank.value]; }
  Counters& mine() const { return of(segment_->rank()); }
  int64_t* offers(Rank rank) const;
  const void* address(int64_t offset) const { return offset == 0 ? nullptr : segment_->at(offset); }
  void announce(std::atomic<uint32_t>& counter, uint32_t round);
  static bool reached(const std::atomic<uint32_t>& counter, uint32_t round) {
    return counter.load(std::memory_order_acquire) >= round;
  }

  std::shared_ptr<Segment> segment_;
  size_t parameters_;
  SharedBlock
      block_;  // counters of all ranks, then for each rank an offset a parameter for its gradient, and one for its sum
};

}  // namespace tessera
