// Bytes held by role, bytes moved and gathers a step: equal to the formulas plus the padding that the layout states,
// exactly.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "models/llama.h"
#include "models/synthetic_data.h"
#include "tessera/base/text.h"
#include "tessera/tessera.h"
#include "tests/support/on_ranks.h"
#include "tests/support/sharded_helpers.h"

namespace tessera::test {
namespace {

using models::Llama;
using models::LlamaConfig;

constexpr int64_t kShared = 64 << 10;  // blocks of this size and more are readable by peers where they are born

// With padding in every unit, gradients that are shared where they are born, and gradients that are copied.
const LlamaConfig kModel = {.layers = 2, .width = 60, .heads = 6, .kv_heads = 2, .hidden = 161, .vocab = 600, .context = 16};
const int64_t kParameters = kModel.parameters();

/// A placement and a working type on a number of ranks.
struct Setting {
  Placements placements;
  torch::Dtype working;
  int ranks;

  int64_t element() const { return working == torch::kBFloat16 ? 2 : 4; }
  double share(Placement where) const { return where == Placement::sharded ? ranks : 1; }
  std::string words() const {
    return text(name_of(placements), working == torch::kBFloat16 ? ", bf16" : ", fp32", " on ", ranks, " ranks");
  }
};

/// A model under training in one rank.
class Training {
 public:
  Training(const World& world, const Setting& setting, const LlamaConfig& config = kModel, bool fused = false,
           bool frozen = false)
      : world_(world),
        model_(seeded(config, frozen)),
        data_(config.vocab, config.context, 1),
        sharded(fully_shard(model_, mesh_for(world, setting.placements),
                            {.placements = setting.placements,
                             .units = units_of<models::LlamaBlockImpl>(),
                             .precision = {.working = setting.working, .gradient = {}}})),
        optimizer_(sharded, {.fused_reduction = fused}) {}

  void step() {
    model_->loss(data_.batch(steps_++, world_.rank, world_.size, 2)).backward();
    optimizer_.step();
    optimizer_.zero_grad();
  }
  /// Loss on held-out samples.
  void evaluate() {
    const torch::NoGradGuard no_grad;
    model_->loss(data_.validation_batch(0, 2));
  }

 private:
  // With `frozen`, the first block requires no gradient: it is the last that backward uses, and nothing is reduced after it.
  static Llama seeded(const LlamaConfig& config, bool frozen) {
    torch::manual_seed(0);
    Llama model(config);
    for (auto& item : model->named_parameters())
      if (frozen && item.key().starts_with("model.layers.0.")) item.value().set_requires_grad(false);
    return model;
  }
  World world_;
  Llama model_;
  models::SyntheticData data_;
  int64_t steps_ = 0;

 public:
  Sharded sharded;

 private:
  AdamW optimizer_;
};

void for_every_setting(const std::function<void(World, const Setting&)>& body) {
  for (const auto& placements : {ddp(), zero1(), zero2(), zero3()})
    for (const auto working : {torch::kFloat, torch::kBFloat16})
      for (const int ranks : {1, 2, 3, 4}) {
        const Setting setting{placements, working, ranks};
        SCOPED_TRACE(setting.words());
        on_ranks(ranks, [&](World world) { body(world, setting); });
        if (testing::Test::HasFailure()) return;
      }
}

/// Σ of what `of` gives for each unit.
template <class Of>
int64_t over_units(const Sharded& sharded, Of&& of) {
  int64_t sum = 0;
  for (const auto& unit : sharded.engine().units()) sum += of(*unit);
  return sum;
}

int64_t padding_of(const Sharded& sharded) {
  return over_units(sharded, [](const Unit& unit) { return unit.layout().padding().value; });
}

/// Bytes of gradients that are too small to be born where peers can read them.
int64_t copied_bytes(const Sharded& sharded, const Setting& setting) {
  return over_units(sharded, [&](const Unit& unit) {
    int64_t bytes = 0;
    for (const auto& parameter : unit.parameters()) {
      const int64_t size = parameter.tensor.numel() * setting.element();
      bytes += size < kShared ? size : 0;
    }
    return bytes;
  });
}

/// Of `Traffic`, what is counted.
struct Counts {
  int64_t gathers, reductions, gathered, reduced;
};

Counts counts_of(const Sharded& sharded) {
  const Traffic traffic = sharded.engine().traffic();
  return {traffic.gathers, traffic.reductions, traffic.gathered.value, traffic.reduced.value};
}

int64_t sum_over_ranks(const Sharded& sharded, int64_t mine) {
  return std::llround(mean_over_ranks(sharded, static_cast<double>(mine)) * sharded.engine().communicator().size());
}

// ---- held --------------------------------------------------------------------------------------------------------------

TEST(Budget, BytesByRoleAreTheFormulasPlusPadding) {
  for_every_setting([](const World& world, const Setting& setting) {
    Training training(world, setting);
    for (int step = 0; step < 3; ++step) training.step();
    const Sharded& sharded = training.sharded;
    ASSERT_EQ(sharded.parameter_count(), kParameters);
    const auto psi = static_cast<double>(kParameters), padding = static_cast<double>(padding_of(sharded));
    ASSERT_GT(padding, 0);
    const auto &parameter = setting.placements.parameter, &gradient = setting.placements.gradient,
               &optimizer = setting.placements.optimizer;
    const double working = static_cast<double>(setting.element()),
                 moments_and_master = setting.working == torch::kBFloat16 ? 12 : 8;
    const StateBytes bytes = sharded.state_bytes();
    EXPECT_NEAR(bytes.parameters, working * psi / setting.share(parameter), 1e-3);
    EXPECT_NEAR(bytes.gradients, working * psi / setting.share(gradient), 1e-3);
    EXPECT_NEAR(bytes.optimizer, moments_and_master * psi / setting.share(optimizer), 1e-3);
    // Replicated gradients stay as backward made them: without padding.
    const double padded_gradient = gradient == Placement::sharded ? working / setting.ranks : 0;
    EXPECT_NEAR(
        bytes.padding,
        padding * (working / setting.share(parameter) + padded_gradient + moments_and_master / setting.share(optimizer)),
        1e-3);
    const auto copied = static_cast<double>(setting.ranks > 1 ? copied_bytes(sharded, setting) : 0);
    if (gradient == Placement::replicated) {
      EXPECT_EQ(bytes.communication_buffers, copied);
    } else {  // and what is lent to peers at once, at most the whole gradient
      EXPECT_GT(bytes.communication_buffers, copied);
      EXPECT_LE(bytes.communication_buffers, copied + working * psi);
    }
  });
}

TEST(Budget, SixteenBytesAParameterAreSplitAsThePlacementSays) {
  for_every_setting([](const World& world, const Setting& setting) {
    Training training(world, setting);
    training.step();
    const StateBytes bytes = training.sharded.state_bytes();
    const double whole = (bytes.parameters + bytes.gradients + bytes.optimizer) / static_cast<double>(kParameters),
                 n = setting.ranks;
    const std::string placement = name_of(setting.placements);
    if (setting.working == torch::kBFloat16)
      EXPECT_NEAR(whole,
                  placement == "ddp"     ? 16
                  : placement == "zero1" ? 4 + 12 / n
                  : placement == "zero2" ? 2 + 14 / n
                                         : 16 / n,
                  1e-9);
    else
      EXPECT_NEAR(whole,
                  placement == "ddp"     ? 16
                  : placement == "zero1" ? 8 + 8 / n
                  : placement == "zero2" ? 4 + 12 / n
                                         : 16 / n,
                  1e-9);
  });
}

TEST(Budget, NothingIsHeldBetweenSteps) {
  for_every_setting([](const World& world, const Setting& setting) {
    for (const auto& [fused, frozen] : {std::pair(false, false), std::pair(true, false), std::pair(false, true)}) {
      Training training(world, setting, kModel, fused, frozen);
      for (int step = 0; step < 3; ++step) {
        training.step();
        for (const auto& unit : training.sharded.engine().units()) {
          EXPECT_EQ(unit->residency(), Residency::sharded) << unit->name() << " after step " << step;
          EXPECT_EQ(unit->lent, Bytes(0)) << unit->name() << " after step " << step;
          for (const auto& parameter : unit->parameters()) EXPECT_FALSE(parameter.tensor.grad().defined()) << parameter.name;
        }
      }
    }
  });
}

// ---- moved -------------------------------------------------------------------------------------------------------------

TEST(Budget, MovedBytesAreTwoOrThreeTimesTheParameters) {
  for_every_setting([](const World& world, const Setting& setting) {
    for (const bool fused : {false, true}) {
      Training training(world, setting, kModel, fused);
      const Sharded& sharded = training.sharded;
      const int64_t others = setting.ranks - 1, width = setting.element(), padded = kParameters + padding_of(sharded);
      const std::string placement = name_of(setting.placements);
      for (int step = 0; step < 4; ++step) {
        const Counts before = counts_of(sharded);
        training.step();
        const Counts after = counts_of(sharded);
        const int64_t gathered = sum_over_ranks(sharded, after.gathered - before.gathered);
        const int64_t reduced = sum_over_ranks(sharded, after.reduced - before.reduced);
        // A replica's parameters are gathered once a step, sharded ones for forward and for backward; padding travels with
        // them.
        EXPECT_EQ(gathered, others * padded * width *
                                (placement == "zero3" ? 2
                                 : placement == "ddp" ? 0
                                                      : 1))
            << "step " << step;
        // An all-reduce is a reduce-scatter and a gather of the sums; gradients travel without padding.
        EXPECT_EQ(reduced, others * kParameters * width * (placement == "ddp" ? 2 : 1)) << "step " << step;
      }
    }
  });
}

TEST(Budget, EvaluationGathersEachUnitOnceMoreWhereParametersAreSharded) {
  for_every_setting([](const World& world, const Setting& setting) {
    Training training(world, setting);
    for (int step = 0; step < 2; ++step) training.step();
    const auto evaluate = [&] {
      const Counts before = counts_of(training.sharded);
      training.evaluate();
      training.sharded.release();
      return counts_of(training.sharded).gathered - before.gathered;
    };
    const int64_t first = evaluate(), second = evaluate();
    const bool sharded = setting.placements.parameter == Placement::sharded;
    EXPECT_EQ(first > 0, setting.ranks > 1 && setting.placements.optimizer == Placement::sharded);
    EXPECT_EQ(second, sharded ? first : 0) << "a replica is up to date after the first pass";
  });
}

// ---- order -------------------------------------------------------------------------------------------------------------

int lines_with(const std::string& schedule, const std::string& kind, const std::string& unit) {
  std::istringstream lines(schedule);
  int count = 0;
  for (std::string phase, what, name; lines >> phase >> what >> name;) count += what == kind && name == unit ? 1 : 0;
  return count;
}

TEST(Budget, EachUnitIsGatheredTwiceAndReducedOnceAStep) {
  for_every_setting([](const World& world, const Setting& setting) {
    Training training(world, setting);
    const Sharded& sharded = training.sharded;
    training.step();
    const std::string schedule = sharded.schedule();
    const auto units = static_cast<int64_t>(sharded.engine().units().size());
    EXPECT_EQ(units, kModel.layers + 1);
    for (const auto& unit : sharded.engine().units()) {
      EXPECT_EQ(lines_with(schedule, "gather", unit->name()), 2) << unit->name() << "\n" << schedule;
      EXPECT_EQ(lines_with(schedule, "release", unit->name()), 2) << unit->name() << "\n" << schedule;
      EXPECT_EQ(lines_with(schedule, "reduce", unit->name()), 1) << unit->name() << "\n" << schedule;
    }
    for (int step = 0; step < 3; ++step) {
      const Counts before = counts_of(sharded);
      training.step();
      const Counts after = counts_of(sharded);
      EXPECT_EQ(after.gathers - before.gathers, 2 * units);
      EXPECT_EQ(after.reductions - before.reductions, units);
      EXPECT_EQ(sharded.schedule(), schedule);
    }
  });
}

TEST(Budget, HybridGathersAndReducesAsOften) {
  for (const bool over_both : {false, true})
    for (const int ranks : {2, 3, 4}) {
      const Setting setting{hybrid("shard", "replicate", over_both), torch::kFloat, ranks};
      SCOPED_TRACE(setting.words());
      on_ranks(ranks, [&](World world) {
        Training training(world, setting);
        const auto units = static_cast<int64_t>(training.sharded.engine().units().size());
        for (int step = 0; step < 4; ++step) {
          const Counts before = counts_of(training.sharded);
          training.step();
          const Counts after = counts_of(training.sharded);
          EXPECT_EQ(after.gathers - before.gathers, 2 * units);
          EXPECT_EQ(after.reductions - before.reductions, units);
          // Of each gradient its sum over all ranks takes in what the others have of it, once; where several ranks update
          // the same elements, each takes in the others' sums.
          const int64_t copies = over_both ? 1 : ranks % 2 == 0 ? 2 : 1;
          const int64_t moved = sum_over_ranks(training.sharded, after.reduced - before.reduced);
          EXPECT_EQ(moved, kParameters * 4 * (ranks - 1 + copies - 1));
        }
      });
    }
}

}  // namespace
}  // namespace tessera::test
