// Where Deferred begins and ends, and tensors that are no parameters.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <thread>

#include "tests/support/deferred_helpers.h"
#include "tests/support/on_ranks.h"

namespace tessera::test {
namespace {

// ---- tensors that are no parameters --------------------------------------------------------------------------------

std::shared_ptr<FilledImpl> with_members() {
  return std::make_shared<FilledImpl>([](FilledImpl& net) {
    net.parameter("weight", torch::randn({3, 3}));
    net.buffer("mean", torch::rand({3}));
    net.buffer("not persistent", torch::arange(4));
    net.plain = torch::outer(torch::arange(4), torch::rand({4}));
    net.view = net.plain.t()[1];
    net.large = torch::rand({300, 300});
  });
}

TEST(DeferredScopes, BuffersAndPlainMembersAreDefined) {
  for_every_placement([](const World& world, const Placements& placements) {
    torch::manual_seed(7);
    const auto eager = with_members();
    torch::manual_seed(7);
    const auto net = deferred(with_members), materialized = [] {
      torch::manual_seed(7);
      return deferred(with_members);
    }();
    const auto sharded = fully_shard(*net, mesh_for(world, placements), {.placements = placements});
    materialize(*materialized);
    for (const auto& got : {net, materialized}) {
      EXPECT_TRUE(has_values(got->named_buffers()["mean"]) && has_values(got->named_buffers()["not persistent"]));
      expect_equal({{"view", eager->view + 1}, {"plain", eager->plain * 2}, {"large", eager->large.clone()}},
                   {{"view", got->view + 1}, {"plain", got->plain * 2}, {"large", got->large.clone()}});
      EXPECT_TRUE(has_values(got->plain));
    }
  });
}

TEST(DeferredScopes, BatchNormTrainsAndCounts) {
  on_ranks(2, [](World world) {
    torch::manual_seed(5);
    auto net = deferred([] { return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4)); });
    auto sharded = fully_shard(*net, Mesh(world));
    net->forward(torch::rand({5, 3})).sum().backward();
    const auto buffers = net->named_buffers();
    EXPECT_EQ(buffers["1.num_batches_tracked"].item<int64_t>(), 1);
    EXPECT_GT(buffers["1.running_mean"].abs().sum().item<float>(), 0);
  });
}

// ---- scopes --------------------------------------------------------------------------------------------------------

TEST(DeferredScopes, ScopesNestAndEndWithExceptions) {
  const auto is_deferred = [] { return !has_values(torch::ones({2})); };
  {
    const Deferred outer;
    {
      const Deferred inner;
      EXPECT_TRUE(is_deferred());
    }
    EXPECT_TRUE(is_deferred());
    {
      const Deferred::Pause pause;
      EXPECT_FALSE(is_deferred());
      const Deferred inner;
      EXPECT_TRUE(is_deferred());
    }
    EXPECT_TRUE(is_deferred());
    try {
      const Deferred inner;
      const auto half = torch::randn({3});
      throw std::runtime_error("constructor");
    } catch (const std::runtime_error&) {
    }
    EXPECT_TRUE(is_deferred());
    EXPECT_THROW(torch::ones({2}).add_(torch::ones({3})), c10::Error);  // the user's own fault stays what it is
  }
  EXPECT_FALSE(is_deferred());
  expect_materialized_as_eager([] { return torch::nn::LSTM(3, 4).ptr(); });
}

TEST(DeferredScopes, ScopesAreTheirThreads) {
  const Deferred scope;
  bool elsewhere = false;
  std::thread([&] { elsewhere = has_values(torch::ones({2})); }).join();
  EXPECT_TRUE(elsewhere);
  EXPECT_FALSE(has_values(torch::ones({2})));
}

TEST(DeferredScopes, TwoModelsOfOneScopeAndAMaterializedOneInIt) {
  on_ranks(2, [](World world) {
    const auto build = [] { return torch::nn::Linear(6, 6); };
    torch::manual_seed(3);
    const auto wanted_first = build(), wanted_second = build();
    torch::manual_seed(3);
    torch::nn::Linear first{nullptr}, second{nullptr};
    {
      const Deferred scope;
      first = build();
      second = build();
      materialize(*first);
    }
    auto sharded = fully_shard(second, Mesh(world));
    expect_equal(registered(*wanted_first), registered(*first));
    expect_equal(registered(*wanted_second), whole(sharded, *second));
  });
}

}  // namespace
}  // namespace tessera::test
