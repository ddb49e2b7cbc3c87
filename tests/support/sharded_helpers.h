#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

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

/// No unit is gathered.
void expect_all_sharded(const Sharded& sharded);

/// A mesh that suits `placements`: for hybrid ones with their two axes (of 2 ranks 2 × 1, of 4 ranks 2 × 2, of an odd number
/// 1 × all), else one axis.
Mesh mesh_for(const World& world, const Placements& placements);

/// ddp, zero1, zero2, zero3, and hybrid with its optimizer over one axis and over both.
std::vector<Placements> every_placement();

/// Runs `body` in forked ranks for each placement and each number of ranks; use mesh_for.
void for_every_placement(const std::function<void(World, const Placements&)>& body,
                         std::initializer_list<int> ranks = {1, 2, 4});

}  // namespace tessera::test
