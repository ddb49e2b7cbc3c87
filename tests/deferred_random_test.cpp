// Random models and random sequences of operators: deferred as at once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/support/deferred_helpers.h"
#include "tests/support/random_net.h"

namespace tessera::test {
namespace {

using torch::Tensor;

TEST(DeferredRandom, Nets) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const RandomNetOptions options{.type = seed % 3 == 0 ? torch::kBFloat16 : torch::kFloat};
    expect_materialized_as_eager([&] { return RandomNet(seed, options).ptr(); });
  }
}

TEST(DeferredRandom, ShardedNets) {
  for (uint64_t seed = 100; seed < 104; ++seed) {
    SCOPED_TRACE(seed);
    expect_sharded_as_eager([&] { return RandomNet(seed, RandomNetOptions()).ptr(); }, nullptr, {2});
  }
}

/// Tensors and views of them that a random sequence of operators makes and fills.
class Scramble {
 public:
  explicit Scramble(uint64_t seed) : random_(seed) {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(seed);
    for (int i = 0; i < 3; ++i) pool.push_back(torch::randn({draw(1, 5), draw(1, 5)}));
    for (int i = 0; i < 40; ++i) apply(draw(0, 17));
  }
  std::vector<Tensor> pool;  // 2-D, none empty

 private:
  int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  Tensor any() { return pool[static_cast<size_t>(draw(0, static_cast<int64_t>(pool.size()) - 1))]; }
  Tensor made(int64_t kind, const Tensor& a, const Tensor& b) {
    switch (kind) {
      case 0:
        return torch::rand({draw(1, 5), draw(1, 5)});
      case 1:
        return a.t();
      case 2:
        return a.narrow(0, a.size(0) / 2, (a.size(0) + 1) / 2);
      case 3:
        return a * 2 + b.mean();
      case 4:
        return a.clone();
      case 5:
        return torch::cat({a.flatten(), b.flatten()}).slice(0, 0, 9).unsqueeze(0);
      case 6:
        return a.to(torch::kDouble).to(torch::kFloat);
      case 7:
        return torch::dropout(a, 0.5, true);
      case 8:
        return torch::randperm(draw(1, 8), torch::kFloat).unsqueeze(1);
      default:
        return torch::randn_like(a);
    }
  }
  void apply(int64_t kind) {
    Tensor a = any();
    const Tensor b = any();
    if (kind < 10) return pool.push_back(made(kind, a, b));
    switch (kind) {
      case 10:
        return (void)a.normal_();
      case 11:
        return (void)a.uniform_(-1, 1);
      case 12:
        return (void)a.mul_(b.flatten()[0].clone()).clamp_(-3, 3);
      case 13:
        return (void)a.select(0, a.size(0) - 1).fill_(0.25);
      case 14:
        return (void)a.copy_(b.flatten()[0].clone().expand_as(a));
      case 15:
        return (void)a.t().exponential_();
      case 16: {
        Tensor real;
        {
          const Deferred::Pause pause;
          real = torch::linspace(0, 1, a.numel());
        }
        a.copy_(real.view(a.sizes()));
        return real.zero_(), void();
      }
      default:
        return (void)a.bernoulli_(0.4).add_(b.sum().tanh());
    }
  }

  std::mt19937_64 random_;
};

TEST(DeferredRandom, SequencesOfOperators) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    const Scramble wanted(seed);
    const Tensor next = torch::rand({3});
    std::vector<Tensor> got;
    {
      const Deferred scope;
      got = Scramble(seed).pool;
    }
    EXPECT_TRUE(torch::equal(torch::rand({3}), next));
    ASSERT_EQ(got.size(), wanted.pool.size());
    std::vector<size_t> order(got.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
    for (const size_t i : order) {
      EXPECT_TRUE(same_bits(values_of({&got[i], 1})[0], wanted.pool[i])) << i;
      materialize({&got[i], 1});
      EXPECT_TRUE(same_bits(got[i], wanted.pool[i])) << i;
    }
  }
}

}  // namespace
}  // namespace tessera::test
