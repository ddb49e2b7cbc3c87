#include "cli/train_command.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/launch_command.h"
#include "cli/output.h"
#include "cli/progress_bar.h"
#include "cli/rank_environment.h"
#include "cli/state_formula.h"
#include "cli/train_loop.h"
#include "cli/train_report.h"
#include "tessera/base/environment.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/storage/memory.h"

namespace tessera::cli {
namespace {

void take_ranks_of(const World& world, const TrainCommand& command, TrainOptions& options) {
  if (command.given.contains("ranks") && options.ranks != world.size)
    throw ConfigError(text("option ranks is ", options.ranks, ", but ", world.launcher, " started ", world.size,
                           world.size == 1 ? " rank" : " ranks", "; leave the option out, or give both the same number"));
  options.ranks = world.size;
}

int threads_of(int wanted, int ranks_here) {
  if (wanted > 0) return wanted;
  const int64_t set = environment_integer("OMP_NUM_THREADS").value_or(0);
  return set > 0 ? static_cast<int>(std::min<int64_t>(set, 1024)) : std::max(1, usable_cores() / ranks_here);
}

void report(const nlohmann::json& result, const TrainOptions& options, const std::string& show) {
  if (show == "all") {
    const std::string summary = summary_text(result);
    if (options.json == "-")
      std::fputs(summary.c_str(), stderr);
    else
      print(summary);
  }
  if (!options.json.empty()) write_json(options.json, result);
}

// Before any rank is started: what all ranks of this host will hold. Each builds the whole model first, and gives it away
// unit by unit.
void require_memory_for(const TrainOptions& options) {
  const int64_t count = options.model.parameters();
  const StateFormula formula = state_formula(options.placement, options.dtype, options.dtype, options.ranks);
  const double trained = options.ranks * formula.bytes(count);
  const double built = options.ranks * (4.0 * static_cast<double>(count) + formula.parameters.bytes(count));
  require_memory(Bytes(static_cast<int64_t>(std::max(trained, built))),
                 text("training ", count, " parameters on ", options.ranks, " ranks as ", options.placement));
}

int run_rank(const TrainOptions& options, const World& world, const TrainCommand& command) {
  at::set_num_threads(threads_of(options.threads_per_rank, world.local_size));
  if (command.given.contains("timeout-ms"))
    ::setenv("TESSERA_TIMEOUT_MS", std::to_string(options.timeout_ms).c_str(), /*overwrite=*/1);
  const bool leader = world.rank.value == 0;
  std::unique_ptr<ProgressBar> bar;
  if (leader && command.show != "nothing") bar = progress_bar(STDERR_FILENO);
  const nlohmann::json result = train(options, world, [&](const TrainProgress& progress) {
    if (bar) bar->show(progress);
  });
  bar.reset();  // its line ends before the summary begins
  if (leader) report(result, options, command.show);
  return 0;
}

}  // namespace

int start_ranks(int ranks, int threads, const std::vector<std::string>& arguments) {
  LaunchOptions launch_options{.ranks = ranks, .prefix_output = false};
  launch_options.command = {std::filesystem::read_symlink("/proc/self/exe").string()};
  launch_options.command.insert(launch_options.command.end(), arguments.begin(), arguments.end());
  launch_options.extra_environment = {{"OMP_NUM_THREADS", std::to_string(threads_of(threads, ranks))}};
  return launch(launch_options);
}

int train_command(const TrainCommand& command) {
  TrainOptions options = command.options;
  const World world = World::from_env();
  if (!world.launcher.empty()) take_ranks_of(world, command, options);
  validate(options);
  require_memory_for(options);
  if (!world.launcher.empty() || options.ranks == 1) return run_rank(options, world, command);
  std::vector<std::string> arguments{"train"};
  arguments.insert(arguments.end(), command.arguments.begin(), command.arguments.end());
  return start_ranks(options.ranks, options.threads_per_rank, arguments);
}

}  // namespace tessera::cli
