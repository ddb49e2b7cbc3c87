#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "tessera/base/types.h"

namespace tessera {

/// One unit's gradients, handed from the ranks that computed them to the ranks that sum them. In rounds: every rank offers
/// where its gradients lie and posts, reads what it needs of its peers' once they have posted, and says so; then the memory
/// is its own again.
class GradientExchange {
 public:
  virtual ~GradientExchange() = default;

  /// Says where this rank's gradient of a parameter lies (memory that peers can read), or that there is none in this round.
  virtual void offer(size_t parameter, const void* gradient) = 0;
  virtual void post(uint32_t round) = 0;
  virtual bool posted(Rank rank, uint32_t round) const = 0;

  /// First byte of `rank`'s gradient of a parameter as this rank can read it, or nullptr if it has none. Valid from posted
  /// to read.
  virtual const void* gradient(Rank rank, size_t parameter) const = 0;

  /// For gradients that stay replicated: the owned part of each parameter's sum now lies at `sum`, for the peers to take.
  virtual void offer_sum(size_t parameter, const void* sum) = 0;
  virtual void post_sums(uint32_t round) = 0;
  virtual bool sums_posted(Rank rank, uint32_t round) const = 0;
  virtual const void* sum(Rank rank, size_t parameter) const = 0;

  /// This rank has read all that it needs of round `round`.
  virtual void finish(uint32_t round) = 0;
  virtual bool finished(Rank rank, uint32_t round) const = 0;

  /// Wait for all ranks to have posted, posted sums, or finished. Each returns the time spent. Throws PeerError.
  virtual std::chrono::nanoseconds wait_posted(uint32_t round, std::string_view unit, int64_t step) = 0;
  virtual std::chrono::nanoseconds wait_sums(uint32_t round, std::string_view unit, int64_t step) = 0;
  virtual std::chrono::nanoseconds wait_finished(uint32_t round, std::string_view unit, int64_t step) = 0;

  /// As wait_posted, but returns without it when every rank that is missing waits itself.
  virtual std::chrono::nanoseconds wait_posted_politely(uint32_t round, std::string_view unit, int64_t step) = 0;
};

}  // namespace tessera
