#include "tests/support/cases.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tessera::test {

UnitPolicy named(std::vector<std::string> names) {
  return [names = std::move(names)](const std::string& name, const torch::nn::Module&) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
}

ShardOptions net_s_options(const Placements& placements) { return {.placements = placements, .units = named({"middle"})}; }

torch::Tensor net_s_loss(NetS& net, const World& world, int64_t s, torch::Dtype type) {
  const int64_t begin = 8 * world.rank.value / world.size, end = 8 * (world.rank.value + 1) / world.size;
  const auto error = net(input_rows(s, begin, end, 6, type)) - target_rows(s, begin, end, 3, type);
  return error.pow(2).sum() * (static_cast<double>(world.size) / (8 * 3));
}

NetS common_net() {
  NetS net;
  set_common_values(*net);
  return net;
}

namespace {

const double kSgdLoss[] = {0.573100111651, 0.523932383766, 0.475849391235},
             kSgdNorm[] = {0.741135127809, 0.715329010691, 0.686741454987};

}  // namespace

void expect_sgd_steps(NetS& net, Sharded& sharded, torch::optim::Optimizer& optimizer, const World& world,
                      double tolerance) {
  for (int s = 0; s < 3; ++s) {
    auto loss = net_s_loss(net, world, s, net->first->weight.scalar_type());
    loss.backward();
    EXPECT_NEAR(mean_over_ranks(sharded, loss.item<double>()), kSgdLoss[s], tolerance);
    EXPECT_NEAR(sharded.grad_norm(), kSgdNorm[s], tolerance);
    optimizer.step();
    optimizer.zero_grad();
  }
  const Sums sums = sums_of(sharded);
  EXPECT_NEAR(sums.sum, -0.435618585112, 10 * tolerance);
  EXPECT_NEAR(sums.absolute, 15.7971839129, 10 * tolerance);
}

}  // namespace tessera::test
