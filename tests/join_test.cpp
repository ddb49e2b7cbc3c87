// Ranks with different numbers of batches.
#include <gtest/gtest.h>

#include <optional>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

// Rank r's batch number b: three rows.
Tensor batch_loss(NetS& net, int rank, int64_t batch) {
  const auto error = net(input_rows(batch, 3 * rank, 3 * rank + 3, 6)) - target_rows(batch, 3 * rank, 3 * rank + 3, 3);
  return error.pow(2).mean();
}

// The last rank has none at all, the others have 4, 3, 2, …
int64_t batches_of(int rank, int ranks) { return rank + 1 == ranks && ranks > 1 ? 0 : 4 - rank; }

// What the ranks together do, in one process. `micro_batches` of each rank in a step.
class Together {
 public:
  Together(int ranks, DivideBy divide_by, int64_t micro_batches)
      : net(common_net()),
        ranks_(ranks),
        divide_by_(divide_by),
        micro_batches_(micro_batches),
        optimizer_(net->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1)) {}

  // Returns the norm of the gradients, which are clipped to 0.5.
  double step(int64_t s) {
    optimizer_.zero_grad();
    for (int64_t batch = s * micro_batches_; batch < (s + 1) * micro_batches_; ++batch) {
      std::vector<Tensor> losses;
      for (int r = 0; r < ranks_; ++r)
        if (batch < batches_of(r, ranks_)) losses.push_back(batch_loss(net, r, batch));
      if (losses.empty()) continue;
      const double divisor = divide_by_ == DivideBy::ranks ? ranks_ : static_cast<double>(losses.size());
      (torch::stack(losses).sum() / divisor).backward();
    }
    const double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    optimizer_.step();
    return norm;
  }

  NetS net;

 private:
  int ranks_;
  DivideBy divide_by_;
  int64_t micro_batches_;
  torch::optim::AdamW optimizer_;
};

void expect_same_parameters(const Sharded& sharded, NetS& wanted) {
  const auto parameters = wanted->named_parameters();
  for (const auto& [name, value] : sharded.full_parameters())
    EXPECT_TRUE(torch::allclose(value, parameters[name], 1e-5, 1e-6)) << name << '\n' << value << parameters[name];
}

// The loop of Sharded::join's documentation, with any optimizer.
template <class Optimizer>
void train(NetS& net, Sharded& sharded, Optimizer& optimizer, const World& world, DivideBy divide_by, bool clip,
           const std::function<void(int64_t, double)>& after_step) {
  int64_t batch = 0;
  while (sharded.join(batch < batches_of(world.rank.value, world.size), divide_by)) {
    if (batch < batches_of(world.rank.value, world.size)) batch_loss(net, world.rank.value, batch).backward();
    const double norm = clip ? sharded.clip_grad_norm(0.5) : 0;
    optimizer.step();
    optimizer.zero_grad();
    after_step(batch++, norm);
  }
  EXPECT_EQ(batch, 4);
}

TEST(Join, EqualsTheUnshardedRun) {
  for (const auto divide_by : {DivideBy::ranks, DivideBy::active_ranks})
    for_every_placement([divide_by](const World& world, const Placements& placements) {
      for (const bool ours : {true, false}) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        Together together(world.size, divide_by, 1);
        const auto check = [&](int64_t step, double norm) {
          EXPECT_NEAR(norm, together.step(step), 1e-6);
          expect_same_parameters(sharded, together.net);
        };
        if (ours) {
          AdamW optimizer(sharded, {.lr = 0.02, .weight_decay = 0.1});
          train(net, sharded, optimizer, world, divide_by, true, check);
        } else {
          torch::optim::AdamW optimizer(sharded.parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
          train(net, sharded, optimizer, world, divide_by, true, check);
        }
        // Afterwards it trains as before.
        net_s_loss(net, world, 0).backward();
        EXPECT_GT(sharded.grad_norm(), 0);
      }
    });
}

TEST(Join, AFusedOptimizerEqualsAnother) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), other = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    auto reference = fully_shard(other, mesh_for(world, placements), net_s_options(placements));
    AdamW fused(sharded, {.lr = 0.02, .fused_reduction = true}), plain(reference, {.lr = 0.02});
    const auto nothing = [](int64_t, double) {};
    train(net, sharded, fused, world, DivideBy::active_ranks, false, nothing);
    train(other, reference, plain, world, DivideBy::active_ranks, false, nothing);
    expect_same_parameters(sharded, other);
  });
}

TEST(Join, MicroBatches) {
  for (const auto divide_by : {DivideBy::ranks, DivideBy::active_ranks})
    for_every_placement([divide_by](const World& world, const Placements& placements) {
      auto net = common_net();
      auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
      AdamW optimizer(sharded, {.lr = 0.02, .weight_decay = 0.1});
      Together together(world.size, divide_by, 2);
      int64_t batch = 0;
      const int64_t mine = batches_of(world.rank.value, world.size);
      for (bool more = true; more;) {
        {
          const auto held = sharded.accumulating();
          more = sharded.join(batch < mine, divide_by);
          if (more && batch < mine) batch_loss(net, world.rank.value, batch).backward();
          ++batch;
        }
        if (!more) break;
        if (sharded.join(batch < mine, divide_by) && batch < mine) batch_loss(net, world.rank.value, batch).backward();
        EXPECT_NEAR(sharded.clip_grad_norm(0.5), together.step(batch / 2), 1e-6);
        ++batch;
        optimizer.step();
        optimizer.zero_grad();
        expect_same_parameters(sharded, together.net);
      }
      EXPECT_EQ(batch, 5);
    });
}

TEST(Join, BySamples) {
  for_every_placement(
      [](const World& world, const Placements& placements) {
        const int64_t rows[2][3] = {{2, 1, 5}, {4, 3, 0}};  // of each rank
        auto net = common_net(), plain = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        torch::optim::SGD optimizer(sharded.parameters(), 0.1), reference(plain->parameters(), 0.1);
        for (int64_t step = 0; step < 3; ++step) {
          const int64_t mine = rows[world.rank.value][step], all = rows[0][step] + rows[1][step];
          const auto loss = [&](NetS& of, int64_t begin, int64_t end) {
            return (of(input_rows(step, begin, end, 6)) - target_rows(step, begin, end, 3)).pow(2).mean();
          };
          ASSERT_TRUE(sharded.join_by(static_cast<double>(mine)));
          const int64_t begin = world.rank.value == 0 ? 0 : rows[0][step];
          if (mine > 0) loss(net, begin, begin + mine).backward();
          loss(plain, 0, all).backward();
          optimizer.step();
          optimizer.zero_grad();
          reference.step();
          reference.zero_grad();
          expect_same_parameters(sharded, plain);
        }
        EXPECT_FALSE(sharded.join_by(0));
        expect_words(refusal<ConfigError>([&] { sharded.join_by(-1); }), {"not negative", "-1"});
      },
      {2});
}

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    torch::manual_seed(2);
    linear = register_module("linear", torch::nn::Linear(4, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
  }
  Tensor forward(const Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

TEST(Join, BuffersAreThoseOfTheRanksThatHadABatch) {
  for (const auto policy : {Buffers::average, Buffers::broadcast})
    on_ranks(4, [policy](const World& world) {
      Normed net;
      auto sharded = fully_shard(net, Mesh(world), {.buffers = policy});
      AdamW optimizer(sharded, {});
      const auto x_of = [](int rank) { return torch::arange(12.0, torch::kFloat).view({3, 4}).sin() * (rank + 1); };
      std::vector<Tensor> means;
      for (const int r : {1, 3}) {
        Normed alone;
        alone(x_of(r));
        means.push_back(alone->norm->running_mean);
      }
      const bool mine = world.rank.value % 2 == 1;
      ASSERT_TRUE(sharded.join(mine));
      if (mine) net(x_of(world.rank.value)).pow(2).mean().backward();
      optimizer.step();
      const auto wanted = policy == Buffers::average ? (means[0] + means[1]) / 2 : means[0];
      EXPECT_TRUE(torch::allclose(net->norm->running_mean, wanted, 1e-6, 1e-7));
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 1);
    });
}

// A unit whose gradients come twice in a backward, which the rank that has no batch in the first step can't see there.
TEST(Join, ARankWithoutABatchFromTheStart) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), plain = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    torch::optim::SGD optimizer(sharded.parameters(), 0.1), reference(plain->parameters(), 0.1);
    const auto loss = [](NetS& of, int rank, int64_t step) {
      const auto middle = [&of](const Tensor& x) { return torch::tanh(of->middle(x)); };
      const auto x = of->first(input_rows(step, 2 * rank, 2 * rank + 2, 6));
      return of->last(recompute(middle, recompute(middle, x))).pow(2).mean();
    };
    for (int64_t step = 0; step < 3; ++step) {
      const auto active = [&](int rank) { return step > 0 || rank == 0; };
      ASSERT_TRUE(sharded.join(active(world.rank.value)));
      if (active(world.rank.value)) loss(net, world.rank.value, step).backward();
      for (int r = 0; r < world.size; ++r)
        if (active(r)) (loss(plain, r, step) / world.size).backward();
      optimizer.step();
      optimizer.zero_grad();
      reference.step();
      reference.zero_grad();
      expect_same_parameters(sharded, plain);
    }
  });
}

TEST(Join, NoRankHasABatch) {
  on_ranks(2, [](const World& world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    EXPECT_FALSE(sharded.join(false));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
    EXPECT_FALSE(sharded.join(false));
  });
}

TEST(Join, Misuse) {
  on_ranks(2, [](const World& world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    sharded.join(true);
    const auto by = world.rank.value == 0 ? DivideBy::ranks : DivideBy::active_ranks;
    expect_words(refusal<AgreementError>([&] { sharded.join(true, by); }), {"step 1", "rank 0", "rank 1", "DivideBy"});
  });
  on_ranks(2, [](const World& world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    AdamW optimizer(sharded, {});
    const bool mine = world.rank.value == 0;
    sharded.join(mine);
    const auto train_on_one = [&] { net_s_loss(net, world, 0).backward(); };
    if (mine)
      train_on_one();
    else
      expect_words(refusal<GuardError>(train_on_one), {"step 1", "rank 1", "no batch", "Sharded::join"});
    EXPECT_TRUE(optimizer.step());
    train_on_one();  // without join all ranks take part again
    EXPECT_TRUE(optimizer.step());
  });
}

// Without join, the error says who ended where.
TEST(Join, WithoutItTheErrorSaysWhoEndedWhere) {
  for (const auto& placements : every_placement())
    on_ranks(2, [&](const World& world) {
      auto net = common_net();
      auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
      AdamW optimizer(sharded, {});
      const auto step = [&](int64_t s) {
        net_s_loss(net, world, s).backward();
        optimizer.step();
        optimizer.zero_grad();
      };
      for (int64_t s = 0; s < 3; ++s) step(s);
      if (world.rank.value == 1) return;
      expect_words(refusal<PeerError>([&] { step(3); }),
                   {"rank 1 has ended its part of the run after step 3", "rank 0 waited", "in step 4", "Sharded::join"});
    });
}

}  // namespace
}  // namespace tessera::test
