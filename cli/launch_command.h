#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/launcher.h"

namespace tessera::cli {

/// Runs the ranks (see `run_ranks`), explains on stderr why they ended unless they all succeeded, and returns the exit
/// status.
int launch(const LaunchOptions& options);

/// What there is to say about a launch that did not succeed: which rank, exit code or signal, its last lines, what was done.
/// Empty if it succeeded, or if it ended because nobody reads our output. Several lines, each with its end.
std::string explain(const LaunchResult& result);

/// {"ranks", "exit_status", "run_id", "seconds", "failure": {"rank", "pid", "exit_code", "signal", "last_lines"} or null,
/// "also_failed", "interrupted_by" (a signal's name or null), "killed", "problem" (or null)}.
nlohmann::json to_json(const LaunchResult& result);

}  // namespace tessera::cli
