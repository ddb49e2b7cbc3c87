#pragma once

#include "tests/support/net_s.h"
#include "tests/support/sharded_helpers.h"

namespace tessera::test {

/// The modules of these names are units.
UnitPolicy named(std::vector<std::string> names);

/// Net S's middle linear is a unit, the rest is in the root.
ShardOptions net_s_options(const Placements& placements);

/// Net S with the common values.
NetS common_net();

/// The loss over this rank's rows such that the mean over ranks is the loss over all eight.
torch::Tensor net_s_loss(NetS& net, const World& world, int64_t s, torch::Dtype type = torch::kFloat);

/// Three steps give the numbers of the table's first row (SGD, lr 0.1), parameters too.
void expect_sgd_steps(NetS& net, Sharded& sharded, torch::optim::Optimizer& optimizer, const World& world,
                      double tolerance = 1e-6);

}  // namespace tessera::test
