#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tessera::cli {

/// Everything `tessera doctor` knows: {"ok" (nothing required is missing), "libtorch", "cpu", "memory", "huge_pages",
/// "kernel", "system_calls", "dev_shm", "limits", "findings"}; see probe_libtorch, machine_files.h, machine_calls.h and
/// `judge` for each. Takes milliseconds. `root` is where /proc, /sys and /etc are read.
nlohmann::json examine_machine(const std::filesystem::path& root = "/");

/// The same for a person: one line for each finding, marked ok, note or missing, then what is missing for what.
std::string describe(const nlohmann::json& examination);

/// 0, or 1 if something is missing without which nothing works.
int exit_status(const nlohmann::json& examination);

}  // namespace tessera::cli
