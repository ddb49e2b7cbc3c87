#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "tessera/optim/adamw.h"
#include "tessera/optim/muon.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// What an optimizer keeps for one parameter.
struct ParameterState {
  /// By torch's names (exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer, square_avg, grad_avg, sum), in the shape of the
  /// parameter (full) or of this rank's shard (local).
  std::map<std::string, at::Tensor> tensors;
  int64_t step = 0;  ///< updates so far; 0 for optimizers that don't count
};

/// By full parameter name. A parameter that was never updated has no entry.
using OptimizerState = std::map<std::string, ParameterState>;

/// The state of an optimizer over the shards of `sharded`: tessera::AdamW or Muon (momentum_buffer), or one of
/// torch::optim's SGD, Adam, AdamW, RMSprop and Adagrad (ConfigError for another). `full`: whole tensors, the same on all
/// ranks, independent of placement, layout and number of ranks; collective, O(state) memory. `local`: copies of this rank's
/// parts; a rank that has no element of a parameter may have no entry. Between steps.
OptimizerState full_state(const Sharded& sharded, AdamW& optimizer);
OptimizerState full_state(const Sharded& sharded, Muon& optimizer);
OptimizerState full_state(const Sharded& sharded, torch::optim::Optimizer& optimizer);
OptimizerState local_state(const Sharded& sharded, AdamW& optimizer);
OptimizerState local_state(const Sharded& sharded, Muon& optimizer);
OptimizerState local_state(const Sharded& sharded, torch::optim::Optimizer& optimizer);

/// Replace all state: parameters without an entry have none afterwards. Tensors of any floating type are rounded to the
/// optimizer's. The state of one AdamW fits the other's. Throw ConfigError naming the parameter for an unknown one, one that
/// is not the optimizer's, a tensor that it doesn't keep, lacks, or has in another shape; nothing is written then. Not
/// collective.
void load_full_state(const Sharded& sharded, AdamW& optimizer, const OptimizerState& state);
void load_full_state(const Sharded& sharded, Muon& optimizer, const OptimizerState& state);
void load_full_state(const Sharded& sharded, torch::optim::Optimizer& optimizer, const OptimizerState& state);
void load_local_state(const Sharded& sharded, AdamW& optimizer, const OptimizerState& state);
void load_local_state(const Sharded& sharded, Muon& optimizer, const OptimizerState& state);
void load_local_state(const Sharded& sharded, torch::optim::Optimizer& optimizer, const OptimizerState& state);

}  // namespace tessera
