#include "tessera/storage/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <optional>

namespace tessera {
namespace {

/// The names of a control group's files in one of the two versions.
struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* use;
  const char* idle_cache;  ///< the field of memory.stat
};
constexpr GroupFiles kVersion2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"},
    kVersion1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};

/// The number in the file; nothing if there is no file, or if it says "max" (no limit).
std::optional<int64_t> number_in(const std::string& file) {
  std::ifstream stream(file);
  int64_t value = 0;
  return stream >> value ? std::optional(value) : std::nullopt;
}

int64_t idle_cache(const std::string& folder, const GroupFiles& files) {
  std::ifstream stream(folder + "/memory.stat");
  int64_t value = 0;
  for (std::string name; stream >> name >> value;)
    if (name == files.idle_cache) return value;
  return 0;
}

int64_t use(const std::string& folder, const GroupFiles& files) {
  return std::max<int64_t>(0, number_in(folder + "/" + files.use).value_or(0) - idle_cache(folder, files));
}

/// Calls `look` with the folder and limit of each group that has one: of the process's and of all above it. In a container
/// the group's path may be one of the host that is not to be seen here: what is missing is passed over, the mount point
/// itself is always looked at.
void for_each_limit(const std::string& root,
                    const std::function<void(const std::string& folder, const GroupFiles&, int64_t limit)>& look) {
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // number:controllers:/path, no controllers in version 2
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version2 = controllers == ",,";
    if (!version2 && controllers.find(",memory,") == std::string::npos) continue;
    const GroupFiles& files = version2 ? kVersion2 : kVersion1;
    for (std::string group = line.substr(second + 1);; group.resize(group.find_last_of('/'))) {
      const std::string folder = root + files.mount + group;
      if (const auto limit = number_in(folder + "/" + files.limit)) look(folder, files, *limit);
      if (group.find('/') == std::string::npos) break;
    }
  }
}

int64_t physical_memory() { return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE); }

}  // namespace

Bytes memory_limit(const std::string& root) {
  int64_t least = physical_memory();
  for_each_limit(root, [&](const std::string&, const GroupFiles&, int64_t limit) { least = std::min(least, limit); });
  return Bytes{least};
}

Bytes memory_left(const std::string& root) {
  int64_t least = physical_memory();
  for_each_limit(root, [&](const std::string& folder, const GroupFiles& files, int64_t limit) {
    least = std::min(least, limit - use(folder, files));
  });
  return Bytes{std::max<int64_t>(0, least)};
}

}  // namespace tessera
