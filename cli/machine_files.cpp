#include "cli/machine_files.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

namespace tessera::cli {
namespace {

using Path = std::filesystem::path;
using nlohmann::json;

std::string contents(const Path& path) {
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

std::optional<int64_t> integer(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return number;
}

json or_null(const std::optional<int64_t>& value) { return value ? json(*value) : json(nullptr); }
json or_null(const std::string& value) { return value.empty() ? json(nullptr) : json(value); }
json or_null(const std::optional<std::string>& value) { return value ? json(*value) : json(nullptr); }

/// The value of the first "name<blanks>:<blanks>value" line.
std::string field(const std::string& text, std::string_view name, char separator = ':') {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name)) continue;
    const size_t at = line.find_first_not_of(" \t", name.size());
    if (at == std::string::npos || line[at] != separator) continue;
    const size_t start = line.find_first_not_of(" \t\"", at + 1);
    const size_t end = line.find_last_not_of(" \t\"");
    return start == std::string::npos ? "" : line.substr(start, end - start + 1);
  }
  return "";
}

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

std::optional<int64_t> kibibytes(const std::string& meminfo, std::string_view name) {
  const auto value = integer(field(meminfo, name));
  return value ? std::optional(*value * 1024) : std::nullopt;
}

/// What a cgroup and the ones above it allow.
struct CgroupLimits {
  std::optional<int64_t> memory, used;
  std::optional<double> cores;

  void take_memory(std::optional<int64_t> limit, std::optional<int64_t> usage) {
    constexpr int64_t kNoLimit = int64_t{1} << 60;  // version 1 writes "none" as the largest multiple of a page
    if (!limit || *limit >= kNoLimit || (memory && *memory <= *limit)) return;
    memory = limit;
    used = usage;
  }
  void take_cores(std::optional<int64_t> quota, std::optional<int64_t> period) {
    if (!quota || *quota <= 0 || period.value_or(0) <= 0) return;
    const double allowed = static_cast<double>(*quota) / static_cast<double>(*period);
    cores = std::min(cores.value_or(allowed), allowed);
  }
};

/// `visit` for `group` below `mount` and each group above it. In a container its own path may not be visible; the mount is
/// then its.
template <class Visit>
void each_group(const Path& mount, const std::string& group, Visit visit) {
  Path path = Path(group).relative_path();
  while (!path.empty()) {
    visit(mount / path);
    path = path.parent_path();
  }
  visit(mount);
}

CgroupLimits read_cgroups(const Path& root) {
  CgroupLimits limits;
  const Path mount = root / "sys/fs/cgroup";
  std::istringstream lines(contents(root / "proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {  // number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    const auto has = [&](const char* name) {
      return ("," + controllers + ",").find(std::string(",") + name + ",") != std::string::npos;
    };
    if (controllers.empty())
      each_group(mount, group, [&](const Path& at) {
        limits.take_memory(integer(contents(at / "memory.max")), integer(contents(at / "memory.current")));
        const auto quota = words(contents(at / "cpu.max"));
        if (quota.size() == 2) limits.take_cores(integer(quota[0]), integer(quota[1]));
      });
    if (has("memory"))
      each_group(mount / "memory", group, [&](const Path& at) {
        limits.take_memory(integer(contents(at / "memory.limit_in_bytes")), integer(contents(at / "memory.usage_in_bytes")));
      });
    if (has("cpu"))
      each_group(mount / "cpu", group, [&](const Path& at) {
        limits.take_cores(integer(contents(at / "cpu.cfs_quota_us")), integer(contents(at / "cpu.cfs_period_us")));
      });
  }
  return limits;
}

}  // namespace

json read_cpu(const Path& root) {
  static constexpr std::string_view kOfInterest[] = {
      "avx2",     "fma",      "f16c",  "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile",
      "amx_bf16", "amx_int8", "asimd", "sve",     "sve2",     "bf16",        "svebf16",     "i8mm"};
  const std::string info = contents(root / "proc/cpuinfo");
  std::string flags = field(info, "flags");
  if (flags.empty()) flags = field(info, "Features");  // Arm
  const auto present = words(flags);
  json features = json::array();
  for (const auto name : kOfInterest)
    if (std::find(present.begin(), present.end(), name) != present.end()) features.push_back(name);
  int64_t cores = 0;
  std::istringstream lines(info);
  for (std::string line; std::getline(lines, line);) cores += line.starts_with("processor") ? 1 : 0;
  return {{"model", or_null(field(info, "model name"))}, {"cores", cores}, {"features", features}};
}

json read_memory(const Path& root) {
  const std::string info = contents(root / "proc/meminfo");
  const CgroupLimits limits = read_cgroups(root);
  return {{"total_bytes", or_null(kibibytes(info, "MemTotal"))},
          {"available_bytes", or_null(kibibytes(info, "MemAvailable"))},
          {"cgroup_limit_bytes", or_null(limits.memory)},
          {"cgroup_used_bytes", or_null(limits.used)},
          {"cgroup_cores", limits.cores ? json(*limits.cores) : json(nullptr)}};
}

json read_huge_pages(const Path& root) {
  const Path transparent = root / "sys/kernel/mm/transparent_hugepage";
  const std::string info = contents(root / "proc/meminfo");
  return {{"anonymous", or_null(chosen(contents(transparent / "enabled")))},
          {"shared", or_null(chosen(contents(transparent / "shmem_enabled")))},
          {"reserved",
           {{"size_bytes", or_null(kibibytes(info, "Hugepagesize"))},
            {"total", or_null(integer(field(info, "HugePages_Total")))},
            {"free", or_null(integer(field(info, "HugePages_Free")))}}}};
}

json read_kernel(const Path& root) {
  return {{"release", or_null(contents(root / "proc/sys/kernel/osrelease"))},
          {"distribution", or_null(field(contents(root / "etc/os-release"), "PRETTY_NAME", '='))},
          {"io_uring_disabled", or_null(integer(contents(root / "proc/sys/kernel/io_uring_disabled")))}};
}

std::optional<std::string> chosen(std::string_view modes) {
  const size_t open = modes.find('['), close = modes.find(']');
  if (open == std::string_view::npos || close == std::string_view::npos || close < open) return std::nullopt;
  return std::string(modes.substr(open + 1, close - open - 1));
}

}  // namespace tessera::cli
