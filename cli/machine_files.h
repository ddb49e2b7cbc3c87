#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::cli {

/// What the kernel says of this machine in /proc and /sys. `root` is "/"; tests give a folder that looks like it. A file
/// that is missing makes its value null, never an error.

/// {"model", "cores" (online), "features" (those of interest that are present)}.
nlohmann::json read_cpu(const std::filesystem::path& root);

/// {"total_bytes", "available_bytes", "cgroup_limit_bytes", "cgroup_used_bytes", "cgroup_cores"}: the tightest limit of this
/// process's cgroups, version 1 or 2; null where there is none. "cgroup_cores" is the quota of processor time, in cores.
nlohmann::json read_memory(const std::filesystem::path& root);

/// {"anonymous", "shared"} (the mode of transparent huge pages: "always", "madvise", "advise", "never", …),
/// "reserved": {"size_bytes", "total", "free"} of the default hugetlb size}.
nlohmann::json read_huge_pages(const std::filesystem::path& root);

/// {"release", "distribution", "io_uring_disabled" (0: open to all, 1: to a group, 2: to nobody, null: no such switch)}.
nlohmann::json read_kernel(const std::filesystem::path& root);

/// The mode in brackets: "madvise" for "always [madvise] never"; nothing if there is none.
std::optional<std::string> chosen(std::string_view modes);

}  // namespace tessera::cli
