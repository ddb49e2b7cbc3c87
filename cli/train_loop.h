#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/train_options.h"
#include "tessera/mesh/world.h"

namespace tessera::cli {

/// How a run stands after a step, as the progress bar shows it.
struct TrainProgress {
  int64_t step = 0, steps = 0;
  double loss = 0;               ///< mean over all ranks' tokens of this step
  double tokens_per_second = 0;  ///< of all ranks, over the last steps
  double memory_bytes = 0;       ///< resident set of this rank
  double exposed_share = 0;      ///< part of the step in which computation waited for other ranks
  double seconds_left = 0;
};

/// One rank's part of a training run. All ranks call it alike (collective); `progress` is called on rank 0 after each step.
/// Returns, on rank 0, the result as docs/train_json.md describes it; elsewhere an empty object. Throws ConfigError,
/// DataError and what fully_shard and the optimizer throw; NonFiniteError for a loss that is not finite, naming step, rank
/// and the operator and unit where it arose.
nlohmann::json train(const TrainOptions& options, const World& world,
                     const std::function<void(const TrainProgress&)>& progress);

}  // namespace tessera::cli
