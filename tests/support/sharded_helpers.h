#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>

#include "tessera/tessera.h"

namespace tessera::test {

/// The mean of `value` over all ranks, exactly as double. Collective.
double mean_over_ranks(const Sharded& sharded, double value);

/// Full reduced gradients by name; undefined where no rank had one. Collective.
std::map<std::string, torch::Tensor> gradients_of(const Sharded& sharded);

struct Sums {
  double sum = 0, absolute = 0;
};
/// Σ and Σ|·| over all parameters, in double.
Sums sums_of(const Sharded& sharded);

/// Runs `body` in forked ranks for each placement and each number of ranks.
void for_every_placement(const std::function<void(World, const Placements&)>& body,
                         std::initializer_list<int> ranks = {1, 2, 4});

}  // namespace tessera::test
