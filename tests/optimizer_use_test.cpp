// What training loops do with optimizers and gradients, against the same on the plain model.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using torch::nn::Linear;

constexpr int64_t kWidth = 1400;

/// Gradients of the first weight are shared where they are born; those of the others are small and copied.
struct WideImpl : torch::nn::Module {
  WideImpl() : first(register_module("first", Linear(6, kWidth))), last(register_module("last", Linear(kWidth, 3))) {
    set_common_values(*this);
  }
  Tensor forward(const Tensor& x) { return last(torch::tanh(first(x))); }
  Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Wide);

Tensor loss_of(Wide& net, int64_t s) {
  return (net(input_rows(s, 0, 8, 6, torch::kDouble)) - target_rows(s, 0, 8, 3, torch::kDouble)).pow(2).mean();
}

Wide new_net() {
  Wide net;
  net->to(torch::kDouble);
  return net;
}

Sharded shard(Wide& net, const World& world, const Placements& placements) {
  return fully_shard(net, mesh_for(world, placements), {.placements = placements, .units = named({"first"})});
}

void expect_same_parameters(const Sharded& sharded, const Wide& plain) {
  auto expected = plain->named_parameters();
  for (const auto& [name, value] : sharded.full_parameters())
    EXPECT_LE((value - expected[name]).abs().max().item<double>(), 1e-12) << name;
}

/// A model under training: either sharded or not.
struct Training {
  Wide net = new_net();
  std::optional<Sharded> sharded;
  std::unique_ptr<torch::optim::Optimizer> optimizer;

  std::vector<Tensor> parameters() { return sharded ? sharded->parameters() : net->parameters(); }
  void backward(int64_t s, double factor = 1) { (loss_of(net, s) * factor).backward(); }
  double clip(double norm) {
    return sharded ? sharded->clip_grad_norm(norm) : torch::nn::utils::clip_grad_norm_(net->parameters(), norm);
  }
};
using Body = std::function<void(Training&)>;

/// Trains the same way with every placement and unsharded, and compares the parameters.
void expect_as_unsharded(const Body& body) {
  for_every_placement([&](const World& world, const Placements& placements) {
    Training training, plain;
    training.sharded = shard(training.net, world, placements);
    for (Training* each : {&training, &plain}) {
      each->optimizer =
          std::make_unique<torch::optim::SGD>(each->parameters(), torch::optim::SGDOptions(0.02).momentum(0.5));
      body(*each);
    }
    expect_same_parameters(*training.sharded, plain.net);
  });
}

TEST(OptimizerUse, GradientsThatAreSetToZero) {
  expect_as_unsharded([](Training& training) {
    for (int64_t s = 0; s < 4; ++s) {
      training.backward(s);
      training.optimizer->step();
      training.optimizer->zero_grad(/*set_to_none=*/false);
    }
  });
}

TEST(OptimizerUse, GradientsThatAreNeverDropped) {
  expect_as_unsharded([](Training& training) {
    for (int64_t s = 0; s < 4; ++s) {
      training.backward(s);
      training.optimizer->step();
    }
  });
}

TEST(OptimizerUse, GradientsThatAreDroppedWithoutAStep) {
  expect_as_unsharded([](Training& training) {
    for (int64_t s = 0; s < 4; ++s) {
      training.backward(s);
      training.optimizer->zero_grad();
      training.backward(s + 1);
      training.optimizer->step();
      training.optimizer->zero_grad();
    }
  });
}

TEST(OptimizerUse, GradientsThatAreChangedInPlace) {
  expect_as_unsharded([](Training& training) {
    for (int64_t s = 0; s < 30; ++s) {
      training.backward(s);
      for (auto& parameter : training.parameters())
        if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
      training.optimizer->step();
      training.optimizer->zero_grad();
    }
  });
}

TEST(OptimizerUse, AllMicroBatchesHeld) {
  expect_as_unsharded([](Training& training) {
    for (int64_t s = 0; s < 3; ++s) {
      for (int64_t micro = 0; micro < 3; ++micro) {
        std::optional<Sharded::Accumulating> held;
        if (training.sharded) held.emplace(training.sharded->engine());
        training.backward(3 * s + micro, 1.0 / 3);
      }
      training.optimizer->step();
      training.optimizer->zero_grad();
    }
  });
}

TEST(OptimizerUse, TwoBackwardsAddUp) {
  expect_as_unsharded([](Training& training) {
    auto first = loss_of(training.net, 0), second = loss_of(training.net, 1);
    first.backward({}, /*retain_graph=*/true);
    second.backward();
    first.backward();
    training.optimizer->step();
  });
}

TEST(OptimizerUse, ClippedTwice) {
  expect_as_unsharded([](Training& training) {
    training.backward(0);
    training.clip(0.5);
    EXPECT_NEAR(training.clip(0.2), 0.5, 1e-5);
    training.optimizer->step();
  });
}

TEST(OptimizerUse, ClippedByValue) {
  expect_as_unsharded([](Training& training) {
    for (int64_t s = 0; s < 3; ++s) {
      training.backward(s);
      training.clip(0.5);
      if (training.sharded)
        training.sharded->clip_grad_value(0.02);
      else
        torch::nn::utils::clip_grad_value_(training.net->parameters(), 0.02);
      training.optimizer->step();
      training.optimizer->zero_grad();
    }
  });
}

TEST(OptimizerUse, ClippedByValueBeforeOurOptimizer) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = new_net(), plain = new_net();
    auto sharded = shard(net, world, placements);
    AdamW ours(sharded, {.lr = 0.01, .eps = 1e-3});
    torch::optim::AdamW theirs(plain->parameters(), torch::optim::AdamWOptions(0.01).eps(1e-3));
    loss_of(net, 0).backward();
    loss_of(plain, 0).backward();
    sharded.clip_grad_norm(0.5);
    sharded.clip_grad_value(0.02);
    torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
    torch::nn::utils::clip_grad_value_(plain->parameters(), 0.02);
    const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e9);
    EXPECT_NEAR(sharded.grad_norm(), norm, 1e-12);
    ours.step();
    theirs.step();
    expect_same_parameters(sharded, plain);
  });
}

TEST(OptimizerUse, TwoStepsOnOneGradient) {
  expect_as_unsharded([](Training& training) {
    training.backward(0);
    training.optimizer->step();
    training.optimizer->step();
  });
}

TEST(OptimizerUse, OurOptimizerDoesTheSame) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = new_net(), plain = new_net();
    auto sharded = shard(net, world, placements);
    AdamW ours(sharded, {.lr = 0.01, .eps = 1e-3});
    torch::optim::AdamW theirs(plain->parameters(), torch::optim::AdamWOptions(0.01).eps(1e-3));
    const auto step = [&](int64_t s) {
      loss_of(net, s).backward();
      loss_of(plain, s).backward();
      ours.step();
      theirs.step();
    };
    step(0);
    step(1);  // adds to the gradient of step 0
    ours.step();
    theirs.step();
    ours.zero_grad();
    theirs.zero_grad();
    step(2);
    expect_same_parameters(sharded, plain);
  });
}

TEST(OptimizerUse, AFusedUpdateCannotBeDropped) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = new_net();
    auto sharded = shard(net, world, placements);
    AdamW optimizer(sharded, {.lr = 0.01, .fused_reduction = true});
    for (int64_t s = 0; s < 2; ++s) {
      optimizer.zero_grad();
      loss_of(net, s).backward();
      if (s == 0) optimizer.step();
    }
    const bool updated = placements == zero2() || placements == zero3() ||
                         placements == hybrid("shard", "replicate", true) ||
                         (world.size == 1 && placements != ddp() && placements != zero1());
    if (updated)
      expect_words(refusal<GuardError>([&] { optimizer.zero_grad(); }), {"fused_reduction", "'first'", "step"});
    else
      optimizer.zero_grad();
    optimizer.step();
  });
}

// A gradient of one parameter is dropped between micro-batches, the others' add up.
TEST(OptimizerUse, TheGradientOfOneParameterIsDropped) {
  for (const bool to_zero : {false, true})
    expect_as_unsharded([to_zero](Training& training) {
      for (int64_t s = 0; s < 3; ++s) {
        for (int64_t micro = 0; micro < 3; ++micro) {
          std::optional<Sharded::Accumulating> held;
          if (training.sharded && micro < 2) held.emplace(training.sharded->engine());
          training.backward(3 * s + micro);
          if (micro != 1) continue;
          auto dropped = training.parameters()[s % 2 == 0 ? 0 : 3];
          if (!to_zero)
            dropped.mutable_grad() = Tensor();
          else if (dropped.grad().defined())
            dropped.mutable_grad().zero_();
        }
        training.optimizer->step();
        training.optimizer->zero_grad();
      }
    });
}

TEST(OptimizerUse, AnyNumberOfBackwardsAStep) {
  expect_as_unsharded([](Training& training) {
    int64_t s = 0;
    for (const int micros : {1, 4, 2, 1, 3}) {
      for (int micro = 0; micro < micros; ++micro) {
        std::optional<Sharded::Accumulating> held;
        if (training.sharded && micro + 1 < micros) held.emplace(training.sharded->engine());
        training.backward(s++, 1.0 / micros);
      }
      training.optimizer->step();
      training.optimizer->zero_grad();
    }
  });
}

TEST(OptimizerUse, GradientsThatAreReplaced) {
  expect_as_unsharded([](Training& training) {
    for (int64_t s = 0; s < 3; ++s) {
      training.backward(s);
      for (auto& parameter : training.parameters())
        if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad() * 0.5;
      training.optimizer->step();
      training.optimizer->zero_grad();
    }
  });
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>&)>;

void expect_optimizer(const MakeOptimizer& make) {
  for_every_placement([&](const World& world, const Placements& placements) {
    auto net = new_net(), plain = new_net();
    auto sharded = shard(net, world, placements);
    const auto ours = make(sharded.parameters()), theirs = make(plain->parameters());
    for (int64_t s = 0; s < 3; ++s) {
      loss_of(net, s).backward();
      loss_of(plain, s).backward();
      for (auto* each : {ours.get(), theirs.get()}) {
        each->step();
        each->zero_grad();
      }
    }
    expect_same_parameters(sharded, plain);
  });
}

TEST(OptimizerUse, EveryOptimizerOfTorchThatTreatsElementsOneByOne) {
  using namespace torch::optim;
  expect_optimizer([](const auto& p) { return std::make_unique<SGD>(p, SGDOptions(0.02).momentum(0.9).nesterov(true)); });
  expect_optimizer([](const auto& p) { return std::make_unique<Adam>(p, AdamOptions(0.01).eps(1e-3).amsgrad(true)); });
  expect_optimizer(
      [](const auto& p) { return std::make_unique<RMSprop>(p, RMSpropOptions(0.01).eps(1e-3).centered(true)); });
  expect_optimizer([](const auto& p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.01).eps(1e-3).lr_decay(0.1)); });
}

// One group of all weights, one that has fewer elements than there are ranks, one that has none.
TEST(OptimizerUse, GroupsOfParameters) {
  expect_optimizer([](const std::vector<Tensor>& p) {
    using torch::optim::OptimizerParamGroup;
    using torch::optim::SGDOptions;
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>{p[0], p[1], p[2]});
    groups.emplace_back(std::vector<Tensor>{p[3]}, std::make_unique<SGDOptions>(SGDOptions(0.3).momentum(0.2)));
    groups.emplace_back(std::vector<Tensor>{}, std::make_unique<SGDOptions>(0.7));
    return std::make_unique<torch::optim::SGD>(groups, SGDOptions(0.02));
  });
}

// In all, fp64, and bf16 with fp32 gradients: the mean, the sum, and other factors, exactly.
TEST(OptimizerUse, GradientsAreDividedByTheDivisor) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const double divisor : {0.0, 1.0, 2.0, 1.0 * world.size, 2.0 * world.size})
      for (const bool bf16 : {false, true}) {
        if (bf16 && placements.gradient == Placement::replicated) continue;
        auto net = common_net(), plain = common_net();
        auto options = net_s_options(placements);
        if (divisor > 0) options.gradient_divisor = divisor;
        if (bf16) options.precision = {.working = torch::kBFloat16, .gradient = torch::kFloat};
        const auto type = bf16 ? torch::kBFloat16 : torch::kDouble;
        (bf16 ? plain : net)->to(type);
        if (!bf16) plain->to(type);
        auto sharded = fully_shard(net, mesh_for(world, placements), options);
        const auto x = input_rows(0, 0, 8, 6, type);
        net(x).sum().backward();
        plain(x).sum().backward();
        const double factor = world.size / (divisor > 0 ? divisor : world.size);
        for (const auto& [name, gradient] : sharded.full_gradients())
          EXPECT_TRUE(torch::equal(gradient, plain->named_parameters()[name].grad().to(gradient.scalar_type()) * factor))
              << name << " over " << divisor;
      }
  });
}

TEST(OptimizerUse, AStepWhileMicroBatchesAreHeldIsRefused) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const bool ours : {false, true}) {
      auto net = new_net();
      auto sharded = shard(net, world, placements);
      std::optional<AdamW> adamw;
      if (ours) adamw.emplace(sharded, AdamWOptions{});
      torch::optim::SGD sgd(sharded.parameters(), 0.1);
      const auto held = sharded.accumulating();
      loss_of(net, 0).backward();
      expect_words(refusal<GuardError>([&] { ours ? static_cast<void>(adamw->step()) : static_cast<void>(sgd.step()); }),
                   {"step 1", "accumulating()"});
    }
  });
}

TEST(OptimizerUse, TheModulesOwnGradientsAreNotLookedAt) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = new_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), {.placements = placements});
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    loss_of(net, 0).backward();
    net->first->bias.mutable_grad() = torch::ones({kWidth}, torch::kDouble);
    expect_words(refusal<GuardError>([&] { optimizer.step(); }), {"'first.bias'", "Sharded::parameters()"});
  });
}

}  // namespace
}  // namespace tessera::test
