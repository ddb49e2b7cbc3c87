#include "cli/memory_sampler.h"

#include <unistd.h>

#include <chrono>
#include <fstream>

namespace tessera::cli {

MemorySampler::MemorySampler() : base_(memory_use()), peak_(base_.proportional.value) {
  thread_ = std::thread([this] {
    while (!stopping_) {
      peak_ = std::max(peak_.load(), memory_use().proportional.value);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
}

void MemorySampler::stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

Bytes resident_now() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return Bytes(resident * sysconf(_SC_PAGESIZE));
}

}  // namespace tessera::cli
