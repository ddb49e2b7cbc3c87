#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tessera::cli {

/// {"built_with", "loaded" (versions), "cxx11_abi", "library" (path of libtorch_cpu), "cpu_kernels" (the SIMD level that
/// ATen chose), "threads", "blas", "devices": {"cuda": 2, …} (kinds with at least one device), "backends": {"gloo", "nccl",
/// "mpi", "ucc": whether the libraries in this process have that c10d process group}}. The back-ends are found by the type
/// information of their classes among the symbols of the loaded libraries, so without c10d's headers (CPU wheels ship them
/// only in part) and without starting one.
nlohmann::json probe_libtorch();

/// The value of `name` in at::show_config()'s "NAME=value, " list; empty if it isn't there.
std::string config_value(const std::string& config, const std::string& name);

}  // namespace tessera::cli
