#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/rank_process.h"

namespace tessera::cli {

/// What to run as the ranks of this host, and how.
struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> command{};  ///< program (looked up in PATH) and its arguments

  /// true: every rank's stdout and stderr reach ours line by line, each line after "[rank N] ".
  /// false: rank 0 has our stdout and stderr themselves (a progress bar works), and what other ranks print is not shown,
  /// except the last lines of the one that fails.
  bool prefix_output = true;

  std::vector<std::pair<std::string, std::string>> extra_environment{};  ///< for all ranks; wins over what the launcher sets

  std::chrono::milliseconds grace{500};             ///< that the others have between SIGTERM and SIGKILL when one rank fails
  std::chrono::milliseconds interrupt_grace{5000};  ///< that all have between our SIGINT, SIGTERM or SIGHUP and SIGKILL
};

/// The rank that ended the launch by failing first.
struct RankFailure {
  int rank = 0;
  pid_t pid = 0;
  RankEnd end{};
  std::vector<std::string> last_lines{};  ///< at most 20 of stdout and stderr; none of rank 0 without `prefix_output`
};

struct LaunchResult {
  int status = 0;  ///< what to exit with; see `run_ranks`
  int ranks = 0;
  std::string run_id{};
  double seconds = 0;
  std::optional<RankFailure> failure{};
  std::vector<int> also_failed{};  ///< ranks that failed within 20 ms of `failure`
  int interrupted_by = 0;          ///< signal to us that ended the launch, or 0
  std::vector<int> killed{};       ///< ranks that did not end within the grace
  std::string problem{};           ///< why the launch itself failed: a program that can't run, output that can't be written
};

/// Runs `options.command` as `options.ranks` processes with torchrun's environment variables and TESSERA_RUN_ID, and returns
/// when all have ended, with everything that they started; nothing is printed but their output.
///
/// - One fails: the others get SIGTERM, and SIGKILL after `grace`; `status` is its exit code, or 128 + signal. Of several
/// that fail
///   within 20 ms the first is the cause, or the first that a signal like SIGKILL or SIGSEGV killed.
/// - We get SIGINT, SIGTERM or SIGHUP: so do they, and SIGKILL after `interrupt_grace` or when we are asked again; `status`
/// is
///   128 + signal. SIGUSR1 and SIGUSR2 are passed on; SIGTSTP (Ctrl-Z) stops the ranks and us.
/// - Our output has no reader any more: as if one had failed, `status` 141 (128 + SIGPIPE), no `problem`. It can't be
/// written
///   (a full disk): `status` 1 and a `problem`.
/// - The program can't be executed: `status` 127 (not found) or 126, and a `problem`.
/// - We are killed (SIGKILL): the kernel and a watchdog end the ranks and what they started.
///
/// Rank 0 reads our stdin, the others /dev/null. Each rank leads a process group, except rank 0 where it has our terminal:
/// it stays in our group, since the terminal would stop it otherwise.
///
/// Must be called from the thread that lives longest (the kernel ties the ranks to it), one call at a time, in a process
/// where no other thread handles the signals above. Throws ConfigError for options that can't be meant, SystemError if the
/// system refuses processes or descriptors; no process is left then either.
LaunchResult run_ranks(const LaunchOptions& options);

}  // namespace tessera::cli
