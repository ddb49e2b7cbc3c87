#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/train_options.h"
#include "models/token_source.h"

namespace tessera::cli {

/// Learning rate of `step` (from 0): linear warm-up, then a cosine from lr to lr · min_lr.
double learning_rate(const TrainOptions& options, int64_t step);

/// Trains the same model on the same samples in this process alone, without Tessera: libtorch's own AdamW and clipping on
/// fp32 master weights. Returns {"loss": largest |difference| over the steps, "parameters": largest |difference| of an
/// element}.
nlohmann::json compare_with_unsharded(const TrainOptions& options, const models::TokenSource& data, int ranks,
                                      const std::vector<double>& losses,
                                      const std::vector<std::pair<std::string, at::Tensor>>& parameters);

}  // namespace tessera::cli
