#include "tessera/storage/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

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

std::optional<int64_t> number_in(const char* file) {
  std::ifstream stream(file);
  int64_t value = 0;
  if (stream >> value) return value;
  return std::nullopt;
}

int64_t left_by_control_group() {
  constexpr std::pair<const char*, const char*> kFiles[] = {
      {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}};
  for (const auto& [limit_file, usage_file] : kFiles) {
    const auto limit = number_in(limit_file), usage = number_in(usage_file);
    if (limit && usage) return std::max<int64_t>(0, *limit - *usage);
  }
  return std::numeric_limits<int64_t>::max();
}

}  // namespace

Bytes available_memory() { return Bytes(std::min(field("/proc/meminfo", "MemAvailable"), left_by_control_group())); }

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

}  // namespace tessera
