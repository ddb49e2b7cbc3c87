#include "tessera/storage/memory.h"

#include <malloc.h>

#include <algorithm>
#include <fstream>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/storage/memory_limit.h"

namespace tessera {
namespace {

constexpr int64_t kKibi = 1024;

int64_t field(const char* file, const std::string& name) {
  std::ifstream lines(file);
  for (std::string word; lines >> word;) {
    int64_t kibibytes = 0;
    if (word == name + ":" && lines >> kibibytes) return kibibytes * kKibi;
  }
  return 0;
}

}  // namespace

Bytes available_memory() { return std::min(Bytes(field("/proc/meminfo", "MemAvailable")), memory_left()); }

void require_memory(Bytes wanted, const std::string& what) {
  const Bytes available = available_memory();
  if (wanted > available)
    throw SystemError(text(what, " needs ", wanted.value, " bytes of memory on this host, but only ", available.value,
                           " are available; use fewer ranks, a smaller model, or a placement that shards more"));
}

MemoryUse memory_use() {
  return {Bytes(field("/proc/self/smaps_rollup", "Rss")), peak_resident(), Bytes(field("/proc/self/smaps_rollup", "Pss"))};
}

Bytes peak_resident() { return Bytes(field("/proc/self/status", "VmHWM")); }

void return_freed_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace tessera
