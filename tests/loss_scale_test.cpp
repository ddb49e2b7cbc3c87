// fp16 training with a loss scale, against the unsharded run with the same casts.
#include <gtest/gtest.h>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

using torch::Tensor;

// ---- training --------------------------------------------------------------------------------------------------------

const LossScale kRule{.initial = 16384, .growth_interval = 2};
constexpr double kClip = 0.3;

/// The loss of one rank's rows in fp16. In step 3 the last rank's is so large that its scaled gradients overflow.
Tensor loss_of(NetS& net, int rank, int ranks, int64_t s) {
  const World world{.rank = Rank(rank), .size = ranks};
  const Tensor loss = net_s_loss(net, world, s, torch::kHalf).to(torch::kFloat);
  return s == 3 && rank == ranks - 1 ? loss * 3000 : loss;
}

/// The unsharded run: fp16 parameters, fp32 master parameters, one pass for each rank's rows. Gradients are summed in fp32
/// and rounded to `kept` while they are scaled, as torch keeps them.
struct Plain {
  Plain() {
    net->to(torch::kHalf);
    for (const auto& item : common_net()->named_parameters())
      masters.push_back(item.value().detach().clone().set_requires_grad(true));
  }
  bool step(int ranks, int64_t s, torch::Dtype kept, torch::optim::Optimizer& optimizer) {
    std::vector<Tensor> sums;
    for (const auto& master : masters) sums.push_back(torch::zeros_like(master).detach());
    for (int r = 0; r < ranks; ++r) {
      (loss_of(net, r, ranks, s) * scaler.scale()).backward();
      size_t i = 0;
      for (auto& parameter : net->parameters())
        sums[i++] += std::exchange(parameter.mutable_grad(), Tensor()).to(torch::kFloat);
    }
    bool finite = true;
    for (size_t i = 0; i < masters.size(); ++i) {
      const Tensor mean = (sums[i] * (1.0 / ranks)).to(kept).to(torch::kFloat);
      finite &= mean.isfinite().all().item<bool>();
      masters[i].mutable_grad() = mean / scaler.scale();
    }
    norm = torch::nn::utils::clip_grad_norm_(masters, kClip);
    finite ? scaler.applied() : scaler.back_off();
    if (!finite) return false;
    optimizer.step();
    const torch::NoGradGuard no_grad;
    size_t i = 0;
    for (auto& parameter : net->parameters()) parameter.copy_(masters[i++]);
    return true;
  }

  NetS net = common_net();
  std::vector<Tensor> masters;
  LossScaler scaler{kRule};
  double norm = 0;
};

struct Setting {
  Placements placements;
  std::optional<torch::Dtype> gradient;
  bool ours = false;  // tessera's AdamW, else torch's
};

void for_every_setting(const std::function<void(World, const Setting&)>& body) {
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        for (const bool ours : {false, true}) {
          body(world, {placements, {}, ours});
          if (placements.gradient == Placement::sharded) body(world, {placements, torch::kFloat, ours});
        }
      },
      {1, 2, 3, 4});
}

ShardOptions options_of(const Setting& setting) {
  auto options = net_s_options(setting.placements);
  options.precision = {.working = torch::kHalf, .gradient = setting.gradient};
  options.loss_scale = kRule;
  return options;
}

void expect_same_masters(const Sharded& sharded, const Plain& plain, const NetS& net, int64_t s) {
  auto names = net->named_parameters();
  for (const auto& [name, shard] : sharded.named_parameters()) {
    size_t i = 0;
    while (names[i].key() != name) ++i;
    const Tensor wanted = sharded.local_of(name, plain.masters[i]);
    EXPECT_TRUE(torch::allclose(shard, wanted, 1e-6, 1e-7))
        << name << " after step " << s << ": " << (shard - wanted).abs().max();
  }
}

TEST(LossScale, DynamicIsTheUnshardedRun) {
  for_every_setting([](const World& world, const Setting& setting) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, setting.placements), options_of(setting));
    Plain plain;
    torch::optim::AdamW theirs(plain.masters, torch::optim::AdamWOptions(0.01).eps(1e-3));
    std::unique_ptr<AdamW> ours;
    std::unique_ptr<torch::optim::AdamW> other;
    if (setting.ours)
      ours = std::make_unique<AdamW>(sharded, AdamWOptions{.lr = 0.01, .eps = 1e-3});
    else
      other = std::make_unique<torch::optim::AdamW>(sharded.parameters(), torch::optim::AdamWOptions(0.01).eps(1e-3));
    std::string applied;
    for (int64_t s = 0; s < 7; ++s) {
      sharded.scale(loss_of(net, world.rank.value, world.size, s)).backward();
      const double norm = sharded.clip_grad_norm(kClip);
      const bool done = setting.ours ? ours->step() : sharded.step(*other);
      sharded.zero_grad();
      EXPECT_EQ(done, plain.step(world.size, s, setting.gradient.value_or(torch::kHalf), theirs)) << s;
      EXPECT_EQ(sharded.loss_scale(), plain.scaler.scale());
      if (done) {
        EXPECT_NEAR(norm, plain.norm, 1e-6 * plain.norm);
      }
      applied += done ? '+' : '-';
      expect_same_masters(sharded, plain, net, s);
    }
    EXPECT_EQ(applied, "+++-+++");
    EXPECT_EQ(sharded.skipped_steps(), 1);
    EXPECT_EQ(sharded.loss_scale_state().scale, 32768);
    EXPECT_EQ(sharded.loss_scale_state().good_steps, 1);
    expect_all_sharded(sharded);
  });
}

/// A factor of two changes no bit of an fp32 run.
TEST(LossScale, FixedChangesNothingInFp32) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net(), scaled_net = common_net();
    auto options = net_s_options(placements);
    auto sharded = fully_shard(net, mesh_for(world, placements), options);
    options.loss_scale = LossScale::fixed(1024);
    auto scaled = fully_shard(scaled_net, mesh_for(world, placements), options);
    for (const bool fused : {false, true}) {
      AdamW optimizer(sharded, {.lr = 0.01, .fused_reduction = fused}),
          other(scaled, {.lr = 0.01, .fused_reduction = fused});
      for (int64_t s = 0; s < 3; ++s) {
        sharded.scale(net_s_loss(net, world, s)).backward();  // without a loss scale: the loss itself
        scaled.scale(net_s_loss(scaled_net, world, s)).backward();
        if (!fused) {
          EXPECT_EQ(sharded.grad_norm(), scaled.grad_norm());
        }
        optimizer.step();
        other.step();
        sharded.zero_grad();
        scaled.zero_grad();
      }
    }
    const auto values = sharded.full_parameters(), scaled_values = scaled.full_parameters();
    for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(torch::equal(values[i].second, scaled_values[i].second));
  });
}

/// Gradients that fp16 can't hold arrive all the same.
TEST(LossScale, SmallGradientsSurvive) {
  for_every_setting([](const World& world, const Setting& setting) {
    for (const bool scaled : {false, true}) {
      auto net = common_net();
      auto options = options_of(setting);
      options.loss_scale = scaled ? std::optional(LossScale::fixed(0x1p24)) : std::nullopt;
      auto sharded = fully_shard(net, mesh_for(world, setting.placements), options);
      std::optional<AdamW> optimizer;
      if (setting.ours) optimizer.emplace(sharded, AdamWOptions{});
      const auto loss = [&](NetS& of, const World& at, torch::Dtype type) {
        return net_s_loss(of, at, 0, type).to(torch::kFloat) * 0x1p-26;
      };
      sharded.scale(loss(net, world, torch::kHalf)).backward();
      auto plain = common_net();
      loss(plain, World{}, torch::kFloat).backward();
      auto wanted = plain->named_parameters();
      double norm = 0, error = 0;
      for (const auto& [name, gradient] : sharded.full_gradients()) {
        norm += gradient.to(torch::kDouble).pow(2).sum().item<double>();
        error += (gradient - wanted[name].grad()).to(torch::kDouble).pow(2).sum().item<double>();
      }
      const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1.0);
      if (scaled) {
        EXPECT_LT(std::sqrt(error), 0.01 * expected);
        EXPECT_NEAR(sharded.grad_norm(), std::sqrt(norm), 1e-6 * expected);
        for (const auto& [name, gradient] : sharded.local_gradients())
          EXPECT_TRUE(torch::allclose(gradient, sharded.local_of(name, wanted[name].grad()), 0.02, 0.02 * expected)) << name;
      } else {
        EXPECT_GT(std::sqrt(error), 0.2 * expected);
      }
    }
  });
}

TEST(LossScale, ClippedByValueInUnscaledUnits) {
  for_every_setting([](const World& world, const Setting& setting) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, setting.placements), options_of(setting));
    std::optional<AdamW> optimizer;
    if (setting.ours) optimizer.emplace(sharded, AdamWOptions{});
    sharded.scale(loss_of(net, world.rank.value, world.size, 0)).backward();
    std::map<std::string, Tensor> before = gradients_of(sharded);
    sharded.clip_grad_value(0.03125);
    for (const auto& [name, gradient] : gradients_of(sharded))
      EXPECT_TRUE(torch::equal(gradient, before[name].clamp(-0.03125, 0.03125))) << name;
    sharded.clip_grad_value(1e9);  // times the scale it is no fp16
  });
}

/// Micro-batches add up, and what is not dropped stays the gradient of the unscaled loss when the scale changes.
TEST(LossScale, GradientsThatStayAreRescaled) {
  for_every_setting([](const World& world, const Setting& setting) {
    auto net = common_net();
    auto options = options_of(setting);
    options.loss_scale->growth_interval = 1;
    auto sharded = fully_shard(net, mesh_for(world, setting.placements), options);
    std::optional<AdamW> ours;
    torch::optim::SGD other(sharded.parameters(), torch::optim::SGDOptions(0.0));
    if (setting.ours) ours.emplace(sharded, AdamWOptions{.lr = 0});
    const auto backward = [&] { sharded.scale(loss_of(net, world.rank.value, world.size, 0) / 8).backward(); };
    backward();
    const auto once = gradients_of(sharded);
    setting.ours ? ours->step() : sharded.step(other);
    EXPECT_EQ(sharded.loss_scale(), 2 * kRule.initial);
    backward();
    for (const auto& [name, gradient] : gradients_of(sharded))
      EXPECT_TRUE(torch::allclose(gradient, 2 * once.at(name), 2e-3, 1e-6)) << name;
  });
}

TEST(LossScale, StateGoesOnWhereItWas) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), options_of({placements, {}}));
    AdamW optimizer(sharded, {});
    sharded.set_loss_scale_state({.scale = 4096, .good_steps = 1});
    sharded.scale(loss_of(net, world.rank.value, world.size, 0)).backward();
    expect_words(refusal<GuardError>([&] { sharded.set_loss_scale_state({}); }), {"between a step and the next backward"});
    EXPECT_TRUE(optimizer.step());
    EXPECT_EQ(sharded.loss_scale(), 8192);
  });
}

/// Backwards inside a backward, and several forwards before one, are of one scaled loss.
TEST(LossScale, RecomputationAndSecondOrderGradients) {
  for_every_setting([](const World& world, const Setting& setting) {
    auto net = common_net(), plain = common_net();
    auto options = net_s_options(setting.placements);
    options.loss_scale = LossScale::fixed(256);
    auto sharded = fully_shard(net, mesh_for(world, setting.placements), options);
    std::optional<AdamW> optimizer;
    if (setting.ours) optimizer.emplace(sharded, AdamWOptions{});
    const auto loss_of = [&](NetS& of, bool again) {
      const Tensor x = input_rows(0, 0, 8, 6).requires_grad_(true);
      const Tensor hidden = again ? recompute(of->first, x) : of->first(x);
      const Tensor y = of->last(torch::tanh(of->middle(torch::tanh(hidden))));
      if (again) return y.pow(2).mean();
      const Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
      return y.pow(2).mean() + slope.pow(2).mean();
    };
    for (const bool again : {true, false}) {
      sharded.scale(loss_of(net, again)).backward();
      loss_of(plain, again).backward();
      auto wanted = plain->named_parameters();
      for (const auto& [name, gradient] : gradients_of(sharded)) {
        ASSERT_EQ(gradient.defined(), wanted[name].grad().defined()) << name;
        if (gradient.defined()) {
          EXPECT_TRUE(torch::allclose(gradient, wanted[name].grad(), 1e-5, 1e-7)) << name;
        }
      }
      sharded.zero_grad();
      plain->zero_grad();
    }
  });
}

// ---- misuse ----------------------------------------------------------------------------------------------------------

TEST(LossScale, AnUnscaledLossIsAnError) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), options_of({placements, {}}));
    expect_words(refusal<GuardError>([&] { loss_of(net, world.rank.value, world.size, 0).backward(); }),
                 {"'last.", "not scaled", "sharded.scale(loss)"});
  });
  for_every_placement([](const World& world, const Placements& placements) {  // also after one that was scaled
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), options_of({placements, {}}));
    AdamW optimizer(sharded, {});
    sharded.scale(loss_of(net, world.rank.value, world.size, 0)).backward();
    optimizer.step();
    optimizer.zero_grad();
    expect_words(refusal<GuardError>([&] { loss_of(net, world.rank.value, world.size, 0).backward(); }), {"not scaled"});
  });
}

TEST(LossScale, ALossThatWasScaledBeforeTheScaleChangedIsAnError) {
  on_ranks(2, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), options_of({zero3(), {}}));
    auto loss = sharded.scale(loss_of(net, world.rank.value, world.size, 0));
    sharded.set_loss_scale_state({.scale = 32});
    expect_words(refusal<GuardError>([&] { loss.backward(); }), {"16384", "32", "Sharded::scale"});
  });
}

TEST(LossScale, ATorchOptimizerThatIsSteppedDirectlyIsAnError) {
  for_every_placement([](const World& world, const Placements& placements) {
    auto net = common_net();
    auto sharded = fully_shard(net, mesh_for(world, placements), options_of({placements, {}}));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    sharded.scale(loss_of(net, world.rank.value, world.size, 3)).backward();
    expect_words(refusal<GuardError>([&] { optimizer.step(); }), {"step 1", "Sharded::step(optimizer)"});
  });
}

TEST(LossScale, AtItsMinimumThePolicyCounts) {
  for_every_placement([](const World& world, const Placements& placements) {
    for (const auto policy : {NonFinite::stop, NonFinite::skip}) {
      auto net = common_net();
      auto options = options_of({placements, {}});
      options.non_finite = policy;
      options.loss_scale->min = options.loss_scale->initial / 2;
      auto sharded = fully_shard(net, mesh_for(world, placements), options);
      AdamW optimizer(sharded, {});
      const auto step = [&] {
        sharded.scale(loss_of(net, world.rank.value, world.size, 3)).backward();
        const bool applied = optimizer.step();
        optimizer.zero_grad();
        return applied;
      };
      EXPECT_FALSE(step());
      if (policy == NonFinite::stop) {
        expect_words(refusal<NonFiniteError>(step), {"step 2", "8192", "can't be lowered"});
      } else {
        EXPECT_FALSE(step());
        EXPECT_EQ(sharded.skipped_steps(), 2);
        EXPECT_EQ(sharded.loss_scale(), 8192);
      }
    }
  });
}

TEST(LossScale, OtherRefusals) {
  on_ranks(2, [](World world) {
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), options_of({zero3(), {}}));
    expect_words(refusal<ConfigError>([&] { AdamW(sharded, {.fused_reduction = true}); }),
                 {"loss scale", "fused_reduction"});
    AdamW optimizer(sharded, {});
    torch::optim::SGD other(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_words(refusal<ConfigError>([&] { sharded.step(other); }), {"Sharded::step", "step()"});
    sharded.set_loss_scale_state({.scale = world.rank.value == 0 ? 64.0 : 32.0});
    sharded.scale(loss_of(net, world.rank.value, world.size, 0)).backward();
    expect_words(refusal<AgreementError>([&] { optimizer.step(); }), {"loss scale", "64", "32"});
  });
  on_ranks(2, [](World world) {
    auto net = common_net();
    auto options = options_of({zero3(), {}});
    if (world.rank.value == 1) options.loss_scale->min = 2;
    expect_words(refusal<AgreementError>([&] { fully_shard(net, Mesh(world), options); }),
                 {"loss scale dynamic", "2 or more"});
    options.loss_scale = LossScale{.initial = -1};
    expect_words(refusal<ConfigError>([&] { fully_shard(net, Mesh(world), options); }), {"loss_scale", "-1"});
  });
}

}  // namespace
}  // namespace tessera::test
