#pragma once

#include <atomic>
#include <thread>

#include "tessera/storage/memory.h"

namespace tessera::cli {

/// Follows this process's proportional set size, which the kernel keeps no peak of, by reading it again and again on a
/// thread of its own. That slows the process, so let it run for a few steps only.
class MemorySampler {
 public:
  MemorySampler();  ///< takes the base and starts
  ~MemorySampler() { stop(); }
  MemorySampler(const MemorySampler&) = delete;
  MemorySampler& operator=(const MemorySampler&) = delete;

  void stop();
  Bytes peak() const { return Bytes(peak_.load()); }      ///< proportional set size
  Bytes base_resident() const { return base_.resident; }  ///< when the sampler was made
  Bytes base_proportional() const { return base_.proportional; }

 private:
  MemoryUse base_;
  std::atomic<int64_t> peak_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

/// Resident set size of this process now. Cheap.
Bytes resident_now();

}  // namespace tessera::cli
