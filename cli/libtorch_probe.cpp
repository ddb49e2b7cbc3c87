#include "cli/libtorch_probe.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/headeronly/version.h>

#include <nlohmann/json.hpp>

namespace tessera::cli {
namespace {

using nlohmann::json;

bool loaded(const char* symbol) { return ::dlsym(RTLD_DEFAULT, symbol) != nullptr; }

std::string library_path() {
  Dl_info info{};
  return ::dladdr(reinterpret_cast<const void*>(&at::show_config), &info) != 0 && info.dli_fname != nullptr ? info.dli_fname
                                                                                                            : "";
}

json devices() {
  json counts = json::object();
  for (const auto type : {c10::DeviceType::CUDA, c10::DeviceType::HIP, c10::DeviceType::XPU, c10::DeviceType::MPS}) {
    if (!c10::impl::hasDeviceGuardImpl(type)) continue;
    const auto count = static_cast<unsigned char>(c10::impl::getDeviceGuardImpl(type)->deviceCount());  // an int8_t ≥ 0
    if (count > 0) counts[c10::DeviceTypeName(type, /*lower_case=*/true)] = count;
  }
  return counts;
}

json backends() {
  return {{"gloo", loaded("_ZTIN4c10d16ProcessGroupGlooE")},
          {"nccl", loaded("_ZTIN4c10d16ProcessGroupNCCLE")},
          {"mpi", loaded("_ZTIN4c10d15ProcessGroupMPIE")},
          {"ucc", loaded("_ZTIN4c10d15ProcessGroupUCCE")}};
}

}  // namespace

std::string config_value(const std::string& config, const std::string& name) {
  size_t at = config.find(" " + name + "=");
  if (at == std::string::npos) return "";
  at += name.size() + 2;
  return config.substr(at, config.find_first_of(",\n", at) - at);
}

json probe_libtorch() {
  const std::string config = at::show_config();
  return {{"built_with", TORCH_VERSION},
          {"loaded", config_value(config, "TORCH_VERSION")},
          {"cxx11_abi", _GLIBCXX_USE_CXX11_ABI == 1},
          {"library", library_path()},
          {"cpu_kernels", at::get_cpu_capability()},
          {"threads", at::get_num_threads()},
          {"blas", config_value(config, "BLAS_INFO")},
          {"devices", devices()},
          {"backends", backends()}};
}

}  // namespace tessera::cli
