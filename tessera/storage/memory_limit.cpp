#include "tessera/storage/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>

#include "tessera/base/environment.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

namespace {
constexpr const char* kBoundVariable = "TESSERA_ARENA_BOUND_BYTES";

/// The number in the file; nothing if there is no file, or if it says "max" (no limit).
std::optional<int64_t> number_in(const std::string& file) {
  std::ifstream stream(file);
  int64_t value = 0;
  return stream >> value ? std::optional(value) : std::nullopt;
}

/// The least limit in `file` of the group and of all groups above it. In a container the group's path may be one of the host
/// that is not to be seen here: what is missing is passed over, the mount point itself is always looked at.
int64_t least_limit(const std::string& mount, std::string group, const std::string& file, int64_t limit) {
  while (true) {
    if (const auto here = number_in(mount + group + "/" + file)) limit = std::min(limit, *here);
    if (group.empty()) return limit;
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}
}  // namespace

Bytes memory_limit(const std::string& root) {
  int64_t limit = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // number:controllers:/path, no controllers in version 2
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",", path = line.substr(second + 1);
    if (controllers == ",,") limit = least_limit(root + "/sys/fs/cgroup", path, "memory.max", limit);
    if (controllers.find(",memory,") != std::string::npos)
      limit = least_limit(root + "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", limit);
  }
  return Bytes{limit};
}

Bytes default_arena_bound(int local_ranks) {
  if (const auto bound = environment_integer(kBoundVariable)) {
    if (*bound <= 0) throw ConfigError(text(kBoundVariable, " must be a positive number of bytes, got ", *bound));
    return Bytes{*bound};
  }
  return Bytes{memory_limit().value / 4 * 3 / std::max(1, local_ranks)};
}

}  // namespace tessera
