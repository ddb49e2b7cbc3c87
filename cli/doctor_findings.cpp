#include "cli/doctor_findings.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

using nlohmann::json;

struct Finding {
  std::string name, text;
  std::string mark = "ok";
  std::string needed_for{}, advice{};
  bool required = false;
};

json to_json(const Finding& finding) {
  return {{"name", finding.name},     {"mark", finding.mark},
          {"text", finding.text},     {"needed_for", finding.needed_for},
          {"advice", finding.advice}, {"required", finding.required}};
}

std::string size_text(const json& bytes) {
  if (!bytes.is_number()) return "unknown";
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = bytes.get<double>();
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  std::ostringstream out;
  out << std::fixed << std::setprecision(value < 10 && unit > 0 && value != std::floor(value) ? 1 : 0) << value << ' '
      << kUnits[unit];
  return out.str();
}

std::string words(const json& list, const char* separator = " ") {
  std::string all;
  for (const auto& word : list) all += text(all.empty() ? "" : separator, word.get<std::string>());
  return all;
}

std::string or_unknown(const json& value) {
  return value.is_string() && !value.get<std::string>().empty() ? value.get<std::string>() : "unknown";
}

bool has(const json& list, std::initializer_list<const char*> any) {
  return std::any_of(any.begin(), any.end(),
                     [&](const char* name) { return std::find(list.begin(), list.end(), name) != list.end(); });
}

std::pair<int, int> version(const std::string& text) {
  int major = 0, minor = 0;
  const char* const end = text.data() + text.size();
  const auto [dot, error] = std::from_chars(text.data(), end, major);
  if (error == std::errc() && dot != end && *dot == '.') std::from_chars(dot + 1, end, minor);
  return {major, minor};
}

Finding libtorch(const json& torch) {
  const std::string built = torch["built_with"], loaded = torch["loaded"];
  Finding finding{"libtorch", text(loaded, torch["cxx11_abi"] ? ", C++11 ABI" : ", pre-C++11 ABI", ", kernels for ",
                                   or_unknown(torch["cpu_kernels"]), ", BLAS ", or_unknown(torch["blas"]), ", in ",
                                   or_unknown(torch["library"]))};
  const auto fail = [&](const std::string& what, const std::string& advice) {
    finding.text = text(what, " (", torch["library"].get<std::string>(), ")");
    finding.mark = "missing";
    finding.needed_for = "everything";
    finding.advice = advice;
    finding.required = true;
  };
  if (version(built) != version(loaded))
    fail(text("built with ", built, ", but ", loaded, " is loaded"),
         "build again, or take the other out of LD_LIBRARY_PATH");
  else if (version(loaded) < std::pair(2, 11))
    fail(text(loaded, " is too old"), "set TESSERA_LIBTORCH to libtorch 2.11 or newer and build again");
  return finding;
}

Finding backends(const json& torch) {
  std::vector<std::string> present{"shared memory"}, absent;
  for (const char* name : {"gloo", "nccl", "mpi", "ucc"})
    (torch["backends"][name].get<bool>() ? present : absent).emplace_back(name);
  Finding finding{"back-ends", words(present, ", ") + (absent.empty() ? "" : "; not " + words(absent, ", "))};
  const bool gpus = !torch["devices"].empty();
  if (gpus && !torch["backends"]["nccl"]) {
    finding.mark = "note";
    finding.needed_for = "fast communication between GPUs: NCCL";
    finding.advice = "use a libtorch built with NCCL";
  } else if (present.size() == 1) {
    finding.mark = "note";
    finding.needed_for = "more than one host: Gloo";
    finding.advice = "use a libtorch built with USE_DISTRIBUTED and USE_GLOO";
  }
  return finding;
}

Finding devices(const json& torch) {
  std::string list;
  for (const auto& [kind, count] : torch["devices"].items())
    list += text(list.empty() ? "" : ", ", count.get<int>(), ' ', kind);
  return {"devices", list.empty() ? "processors only" : list};
}

Finding processor(const json& cpu, const json& memory) {
  const int64_t cores = cpu["cores"];
  Finding finding{"processor", text(or_unknown(cpu["model"]), ", ", cores, cores == 1 ? " core" : " cores")};
  if (memory["cgroup_cores"].is_number() && memory["cgroup_cores"] < cores) {
    finding.mark = "note";
    finding.text += text(", of which the cgroup grants ", memory["cgroup_cores"].get<double>());
    finding.needed_for = "steady steps: ranks × threads no more than the cores granted";
    finding.advice = "choose --ranks and --threads-per-rank by the cgroup's number";
  }
  return finding;
}

Finding vectors(const json& features) {
  Finding finding{"SIMD", features.empty() ? "none of interest" : words(features)};
  if (!has(features, {"avx2", "asimd"})) {
    finding.mark = "note";
    finding.needed_for = "fast sums and optimizer steps: AVX2 or better";
  } else if (!has(features, {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})) {
    finding.mark = "note";
    finding.needed_for = "fast --dtype bf16: avx512_bf16 or amx_bf16";
    finding.advice = "prefer --dtype fp32 here";
  }
  return finding;
}

Finding memory_left(const json& memory) {
  Finding finding{"memory",
                  text(size_text(memory["total_bytes"]), ", ", size_text(memory["available_bytes"]), " available")};
  if (memory["cgroup_limit_bytes"].is_number() && memory["total_bytes"].is_number() &&
      memory["cgroup_limit_bytes"] < memory["total_bytes"])
    finding.text += text("; the cgroup allows ", size_text(memory["cgroup_limit_bytes"]), ", ",
                         size_text(memory["cgroup_used_bytes"]), " used");
  return finding;
}

Finding system_call(const std::string& name, const json& refusal, bool required, const std::string& needed_for,
                    const std::string& advice) {
  if (refusal.is_null()) return {name, "works"};
  return {name, "refused: " + refusal.get<std::string>(), "missing", needed_for, advice, required};
}

Finding io_uring(const json& facts) {
  const json& disabled = facts["kernel"]["io_uring_disabled"];
  const bool switched_off = disabled.is_number() && disabled > 0;
  return system_call(
      "io_uring", facts["system_calls"]["io_uring"], false,
      "asynchronous reads and writes of checkpoints and offloaded state",
      switched_off ? "sysctl kernel.io_uring_disabled=0" : "allow io_uring_setup in the container's seccomp profile");
}

bool can_write(const json& shm) { return !shm.is_null() && shm["writable"].get<bool>(); }

Finding dev_shm(const json& shm) {
  constexpr int64_t kSmall = 256 << 20;
  const bool usable = can_write(shm);
  Finding finding{"/dev/shm", usable ? text(size_text(shm["size_bytes"]), ", ", size_text(shm["free_bytes"]), " free")
                                     : "can't be written"};
  if (usable && shm["free_bytes"].get<int64_t>() >= kSmall) return finding;
  finding.mark = usable ? "note" : "missing";
  finding.needed_for = "NCCL and PyTorch's data loaders, and the ranks where memfd can't be shared";
  finding.advice = "mount -o remount,size=50% /dev/shm, or docker run --shm-size=2g";
  return finding;
}

Finding huge_pages(const std::string& name, const json& mode, std::initializer_list<const char*> good,
                   const std::string& needed_for, const std::string& advice) {
  if (!mode.is_string()) return {name, "not in this kernel", "missing", needed_for};
  const bool on = std::find(good.begin(), good.end(), mode.get<std::string>()) != good.end();
  if (on) return {name, mode};
  return {name, mode, "note", needed_for, advice};
}

Finding reserved_pages(const json& reserved) {
  if (!reserved["total"].is_number() || reserved["total"] == 0) return {"huge pages, reserved", "none (none needed)"};
  return {"huge pages, reserved", text(reserved["free"].get<int64_t>(), " of ", reserved["total"].get<int64_t>(), " free, ",
                                       size_text(reserved["size_bytes"]), " each")};
}

Finding limits(const json& limits) {
  const json& files = limits["open_files"];
  const json& space = limits["address_space_bytes"];
  Finding finding{"limits", text("open files ", files.is_null() ? "unlimited" : files.dump(), ", locked memory ",
                                 limits["locked_bytes"].is_null() ? "unlimited" : size_text(limits["locked_bytes"]),
                                 ", address space ", space.is_null() ? "unlimited" : size_text(space))};
  if (files.is_number() && files < 1024) {
    finding.mark = "note";
    finding.needed_for = "many ranks: descriptors for each pair of them";
    finding.advice = "ulimit -n 4096";
  }
  if (space.is_number()) {
    finding.mark = "note";
    finding.needed_for = "shared mappings, which reserve address space before they use memory";
    finding.advice = "ulimit -v unlimited";
  }
  return finding;
}

}  // namespace

json judge(const json& facts) {
  const json &torch = facts["libtorch"], &kernel = facts["kernel"], &calls = facts["system_calls"],
             &huge = facts["huge_pages"];
  const std::string sysfs = "/sys/kernel/mm/transparent_hugepage/";
  const Finding findings[] = {
      {"system", text(or_unknown(kernel["distribution"]), ", Linux ", or_unknown(kernel["release"]))},
      libtorch(torch),
      backends(torch),
      devices(torch),
      processor(facts["cpu"], facts["memory"]),
      vectors(facts["cpu"]["features"]),
      memory_left(facts["memory"]),
      system_call("memfd", calls["memfd"], !can_write(facts["dev_shm"]), "memory that ranks share (else a file in /dev/shm)",
                  "Linux 3.17 or newer; allow memfd_create in the container"),
      system_call("pidfd", calls["pidfd"], true, "noticing within a second that a rank died",
                  "Linux 5.3 or newer; allow pidfd_open in the container"),
      system_call("futex", calls["futex"], true, "waiting for other ranks", "allow futex in the container"),
      system_call("unix sockets", calls["descriptor_passing"], false, "handing shared memory to the ranks of one run only",
                  "allow AF_UNIX sockets in the container"),
      dev_shm(facts["dev_shm"]),
      huge_pages("huge pages, private", huge["anonymous"], {"always", "madvise"}, "fewer page faults in each step",
                 text("echo madvise > ", sysfs, "enabled (as root)")),
      huge_pages("huge pages, shared", huge["shared"], {"always", "within_size", "advise", "force"},
                 "faster reads of other ranks' gradients", text("echo advise > ", sysfs, "shmem_enabled (as root)")),
      reserved_pages(huge["reserved"]),
      io_uring(facts),
      limits(facts["limits"]),
  };
  json list = json::array();
  for (const auto& finding : findings) list.push_back(to_json(finding));
  return list;
}

}  // namespace tessera::cli
