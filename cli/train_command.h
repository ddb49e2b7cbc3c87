#pragma once

#include <set>
#include <string>
#include <vector>

#include "cli/train_options.h"

namespace tessera::cli {

/// A call of `tessera train`.
struct TrainCommand {
  TrainOptions options;
  std::set<std::string> given{};         ///< names of the options that the command line or the configuration file sets
  std::vector<std::string> arguments{};  ///< as given, without program and "train"
  std::string show = "all";              ///< "all", "progress" (no summary) or "nothing"
};

/// Trains, as one rank or as the parent of local ranks, prints on rank 0 what there is to see, and returns the exit status.
///
/// Under a launcher this process is one rank. Otherwise `options.ranks` processes are started that run this program with the
/// same arguments; a single rank needs no other process. Progress goes to stderr; the summary to stdout, or to stderr if
/// that gets the JSON. Throws ConfigError for options that can't be meant, among them `ranks` other than what the launcher
/// says; DataError for a file that can't be read, before any rank is started; and as `train` does.
int train_command(const TrainCommand& command);

/// Runs this program as `ranks` local processes that get `arguments` ("train" and its options); explains on stderr why they
/// ended unless all succeeded, and returns the exit status. `threads`: of each rank, or 0 for OMP_NUM_THREADS, or cores /
/// ranks if that isn't set.
int start_ranks(int ranks, int threads, const std::vector<std::string>& arguments);

}  // namespace tessera::cli
