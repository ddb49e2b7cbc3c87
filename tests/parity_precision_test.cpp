// Random small models in 16 bits, sharded at random, against an unsharded run with the same casts: bit by bit.
// TESSERA_TEST_SEED repeats the draw of that seed, TESSERA_TEST_DRAWS says how many follow it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/optim/adamw_kernel.h"
#include "tessera/tessera.h"
#include "tests/support/draws.h"
#include "tests/support/on_ranks.h"
#include "tests/support/random_net.h"
#include "tests/support/sharded_helpers.h"

namespace tessera::test {
namespace {

using torch::Tensor;

constexpr int kSteps = 4;
const AdamWOptions kAdamW = {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.05};

enum class Updates { adamw, fused_adamw, torch_sgd };
constexpr const char* kUpdates[] = {"AdamW", "fused AdamW", "torch SGD with momentum on shards"};

/// All that is drawn of a run.
struct Draw {
  explicit Draw(uint64_t seed);
  static std::vector<Simpler<Draw>> simpler();
  std::string description() const;
  bool ours() const { return updates != Updates::torch_sgd; }
  /// Gradients of micro-batches add up on each rank, in fp32, before they are reduced.
  bool adds_up_first() const { return ours() && placements.gradient == Placement::replicated; }
  /// Does the fused optimizer get the ranks' own gradients, without a rounded sum in between? Not in the first step where
  /// gradients are sharded, and not where several ranks update the same elements.
  bool sums_in_update(int step) const {
    const bool hybrids = !placements.shard_axis.empty();
    const int parts = placements.optimizer == Placement::replicated ? 1
                      : hybrids && !placements.optimizer_over_both  ? ranks / replicas
                                                                    : ranks;
    return updates == Updates::fused_adamw && parts == ranks && (placements.gradient == Placement::replicated || step > 0);
  }
  double kept_scale(double scale) const { return gradient == torch::kHalf ? scale : 1; }
  /// In which the ranks hand their gradients over.
  torch::Dtype taken() const { return placements.gradient == Placement::replicated ? gradient : net.type; }
  uint64_t data(int step, int micro, int rank) const {
    return seed * 1000 + static_cast<uint64_t>((step * micros + micro) * ranks + rank);
  }
  uint64_t without(int step, int micro, int rank) const {
    std::mt19937_64 random(data(step, micro, rank) ^ 0x0b7);
    return net.optional && random() % 2 == 0 ? random() : 0;
  }

  uint64_t seed;
  int ranks, micros;
  Placements placements;
  int replicas = 1;  ///< of a hybrid placement
  LayoutKind layout;
  RandomNetOptions net;
  torch::Dtype gradient;
  std::optional<torch::Dtype> moments;
  std::optional<LossScale> loss_scale;
  Updates updates;
  bool by_blocks;  ///< the linear layers are units
};

Draw::Draw(uint64_t drawn) : seed(drawn) {
  std::mt19937_64 random(seed ^ 0x16b17);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const LayoutKind kinds[] = {flat(), per_parameter(), per_parameter(-1), block(draw(1, 9)), whole_parameters()};
  ranks = draw(1, 5);
  micros = draw(0, 1) == 0 ? draw(2, 3) : 1;
  placements = every_placement()[static_cast<size_t>(draw(0, 5))];
  layout = kinds[draw(0, 4)];
  net.type = draw(0, 1) == 0 ? torch::kBFloat16 : torch::kHalf;
  updates = static_cast<Updates>(draw(0, 2));
  gradient = draw(0, 1) == 0 ? torch::kFloat : net.type;
  if (draw(0, 1) == 0) moments = torch::kBFloat16;
  const double scale = std::ldexp(1.0, draw(6, 20));  // the largest overflow in fp16
  if (draw(0, 2) > 0)
    loss_scale = updates == Updates::fused_adamw
                     ? LossScale::fixed(64)
                     : LossScale{.initial = scale, .growth_interval = draw(1, 2), .min = 1.0 / 1024};
  net.optional = draw(0, 1) == 0;
  net.frozen = !(updates == Updates::fused_adamw && net.optional) && draw(0, 1) == 0;
  by_blocks = draw(0, 1) == 0;
  while (!placements.shard_axis.empty() && ranks % (replicas = draw(1, ranks)) != 0) {
  }
}

std::vector<Simpler<Draw>> Draw::simpler() {
  return {{"one-micro-batch", [](Draw& d) { d.micros = 1; }},
          {"no-units", [](Draw& d) { d.by_blocks = false; }},
          {"flat", [](Draw& d) { d.layout = flat(); }},
          {"sgd", [](Draw& d) { d.updates = Updates::torch_sgd; }},
          {"not-scaled", [](Draw& d) { d.loss_scale.reset(); }},
          {"fp32-moments", [](Draw& d) { d.moments.reset(); }},
          {"fp32-gradients", [](Draw& d) { d.gradient = torch::kFloat; }}};
}

std::string Draw::description() const {
  return text("TESSERA_TEST_SEED=", seed, ": ", ranks, " ranks, ", name_of(placements), ", ", replicas, " replicas, ",
              name_of(layout), ", ", kUpdates[static_cast<int>(updates)], ", ", c10::toString(net.type), ", gradients ",
              c10::toString(gradient), ", moments ", moments ? "BFloat16" : "Float", ", loss scale ", name_of(loss_scale),
              ", ", micros, " micro-batches", by_blocks ? ", units" : "", "; ", RandomNet(seed, net)->description());
}

/// What a run shows after each step.
struct Seen {
  bool applied;
  double scale;
  std::map<std::string, Tensor> gradients, masters;  // whole, of parameters that had a gradient; all
};

// ---- the unsharded run ---------------------------------------------------------------------------------------------------

struct PlainParameter {
  Tensor working, master;
  std::vector<Tensor> of_ranks;  ///< each rank's gradient of this micro-batch, or of all of them if it adds up first
  Tensor kept;                   ///< the reduced gradient
  bool alone = false;            ///< it has what `of_ranks` has, and no more
  Tensor exp_avg, exp_avg_sq;
  int64_t updates = 0;
};

// kept ← kept + round(scale · Σ ranks)
void reduce(const Draw& draw, PlainParameter& p, double scale) {
  Tensor sum;
  for (const auto& gradient : p.of_ranks)
    if (gradient.defined()) sum = sum.defined() ? sum + gradient.to(torch::kFloat) : gradient.to(torch::kFloat);
  p.alone = sum.defined() && !p.kept.defined();
  if (!sum.defined()) return;
  sum = (sum * static_cast<float>(draw.kept_scale(scale) / draw.ranks / scale)).to(draw.gradient).to(torch::kFloat) *
        static_cast<float>(1 / draw.kept_scale(scale));
  p.kept = p.kept.defined() ? sum + p.kept : sum;
}

void update_adamw(const Draw& draw, PlainParameter& p, double scale, int step) {
  const bool ranks_own = draw.sums_in_update(step) && p.alone;
  std::vector<const void*> sources;
  for (const auto& gradient : ranks_own ? p.of_ranks : std::vector{p.kept})
    if (gradient.defined()) sources.push_back(gradient.const_data_ptr());
  const double factor = ranks_own ? 1.0 / draw.ranks / scale : 1;
  const AdamWStep factors{.lr = kAdamW.lr,
                          .beta1 = kAdamW.beta1,
                          .beta2 = kAdamW.beta2,
                          .eps = kAdamW.eps,
                          .weight_decay = kAdamW.weight_decay,
                          .step = ++p.updates,
                          .gradient_scale = factor};
  const auto moment = draw.moments.value_or(torch::kFloat);
  if (!p.exp_avg.defined()) {
    p.exp_avg = torch::zeros(p.master.sizes(), moment);
    p.exp_avg_sq = torch::zeros(p.master.sizes(), moment);
  }
  adamw_update({sources, element_of(ranks_own ? draw.taken() : torch::kFloat)}, factors,
               {.master = p.master.data_ptr(),
                .exp_avg = p.exp_avg.data_ptr(),
                .exp_avg_sq = p.exp_avg_sq.data_ptr(),
                .element = Element::float32,
                .moment_element = element_of(moment),
                .working = p.working.data_ptr(),
                .working_element = element_of(draw.net.type)},
               p.master.numel());
}

std::vector<Seen> unsharded(const Draw& draw) {
  RandomNet net(draw.seed, draw.net);
  std::vector<std::pair<std::string, PlainParameter>> parameters;
  std::vector<Tensor> masters;
  for (const auto& [name, tensor] : net->unique_parameters()) {
    PlainParameter p;
    p.working = tensor;
    p.master = tensor.detach().to(torch::kFloat).contiguous();
    p.of_ranks.resize(static_cast<size_t>(draw.ranks));
    masters.push_back(p.master);
    parameters.emplace_back(name, p);
  }
  torch::optim::SGD sgd(masters, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
  LossScaler scaler(draw.loss_scale);
  std::vector<Seen> all;
  for (int step = 0; step < kSteps; ++step) {
    const double scale = scaler.scale();
    for (int micro = 0; micro < draw.micros; ++micro) {
      for (int r = 0; r < draw.ranks; ++r) {
        const Tensor loss = net->loss(draw.data(step, micro, r), 2 + r % 2, draw.without(step, micro, r)) / draw.micros;
        (loss.to(torch::kFloat) * scale).backward();
        for (auto& [name, p] : parameters) {
          Tensor& sum = p.of_ranks[static_cast<size_t>(r)];
          const Tensor gradient = std::exchange(p.working.mutable_grad(), Tensor());
          if (!draw.adds_up_first())
            sum = gradient;
          else if (gradient.defined())
            sum = sum.defined() ? sum.to(torch::kFloat) + gradient : gradient.to(torch::kFloat);
        }
      }
      if (draw.adds_up_first() && micro + 1 < draw.micros) continue;
      for (auto& [name, p] : parameters)
        for (auto& gradient : p.of_ranks)
          if (gradient.defined()) gradient = gradient.to(draw.taken());
      for (auto& [name, p] : parameters) reduce(draw, p, scale);
    }
    Seen seen{true, 0, {}, {}};
    for (auto& [name, p] : parameters) {
      if (!p.kept.defined()) continue;
      seen.applied = seen.applied && p.kept.isfinite().all().item<bool>();
      seen.gradients[name] = p.kept.clone();
    }
    const torch::NoGradGuard no_grad;
    for (auto& [name, p] : parameters) {
      if (!seen.applied || !p.kept.defined()) continue;
      if (draw.ours())
        update_adamw(draw, p, scale, step);
      else
        p.master.mutable_grad() = seen.gradients[name].clone();
    }
    if (seen.applied && !draw.ours()) {
      sgd.step();
      for (auto& [name, p] : parameters) p.working.detach().copy_(p.master);
    }
    seen.applied ? scaler.applied() : scaler.back_off();
    seen.scale = scaler.scale();
    for (auto& [name, p] : parameters) {
      p.kept = Tensor();
      p.of_ranks.assign(p.of_ranks.size(), Tensor());
      p.master.mutable_grad() = Tensor();
      seen.masters[name] = p.master.clone();
    }
    all.push_back(std::move(seen));
  }
  return all;
}

// ---- the sharded run
// -------------------------------------------------------------------------------------------------------

std::vector<Seen> sharded_run(const Draw& draw, const World& world) {
  const int rank = world.rank.value;
  RandomNet net(draw.seed, draw.net);
  const bool hybrids = !draw.placements.shard_axis.empty();
  const UnitPolicy linears = units_of<torch::nn::LinearImpl>();
  bool any = false;
  for (const auto& item : net->named_modules("", false)) any |= linears(item.key(), *item.value());
  auto sharded = fully_shard(
      net, hybrids ? Mesh(world, {{"replicate", draw.replicas}, {"shard", world.size / draw.replicas}}) : Mesh(world),
      {.placements = draw.placements,
       .units = draw.by_blocks && any ? linears : nullptr,
       .layouts = {{"*", draw.layout}},
       .precision = {.gradient = draw.gradient},
       .non_finite = draw.updates == Updates::fused_adamw ? NonFinite::stop : NonFinite::skip,
       .loss_scale = draw.loss_scale});
  std::optional<AdamW> ours;
  std::optional<torch::optim::SGD> theirs;
  if (draw.ours()) {
    auto options = kAdamW;
    options.fused_reduction = draw.updates == Updates::fused_adamw;
    options.moments = draw.moments;
    ours.emplace(sharded, options);
  } else {
    theirs.emplace(sharded.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
  }
  std::vector<Seen> all;
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < draw.micros; ++micro) {
      const Tensor loss =
          net->loss(draw.data(step, micro, rank), 2 + rank % 2, draw.without(step, micro, rank)) / draw.micros;
      std::optional<Sharded::Accumulating> held;
      if (micro + 1 < draw.micros) held.emplace(sharded.engine());
      draw.loss_scale ? sharded.scale(loss).backward() : loss.to(torch::kFloat).backward();
    }
    Seen seen{true, 0, {}, {}};
    if (draw.updates != Updates::fused_adamw)
      for (const auto& [name, gradient] : sharded.full_gradients())
        if (gradient.defined()) seen.gradients[name] = gradient;
    seen.applied = ours ? ours->step() : sharded.step(*theirs);
    sharded.zero_grad();
    seen.scale = sharded.loss_scale();
    for (const auto& [name, shard] : sharded.named_parameters()) seen.masters[name] = sharded.full_of(name, shard);
    all.push_back(std::move(seen));
  }
  return all;
}

bool same(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && torch::equal(a.nan_to_num(), b.nan_to_num()) && torch::equal(a.isnan(), b.isnan());
}

void compare(const Draw& draw, const World& world) {
  const auto plain = unsharded(draw), sharded = sharded_run(draw, world);
  for (size_t s = 0; s < kSteps; ++s) {
    EXPECT_EQ(sharded[s].applied, plain[s].applied) << "step " << s + 1;
    EXPECT_EQ(sharded[s].scale, plain[s].scale) << "step " << s + 1;
    if (draw.updates != Updates::fused_adamw) {
      EXPECT_EQ(sharded[s].gradients.size(), plain[s].gradients.size()) << "step " << s + 1;
      for (const auto& [name, gradient] : sharded[s].gradients)
        EXPECT_TRUE(plain[s].gradients.contains(name) &&
                    same(gradient, plain[s].gradients.at(name).to(gradient.scalar_type())))
            << "gradient of " << name << " in step " << s + 1;
    }
    for (const auto& [name, master] : sharded[s].masters)
      EXPECT_TRUE(same(master, plain[s].masters.at(name))) << name << " after step " << s + 1;
    if (testing::Test::HasFailure()) return;
  }
}

TEST(ParityPrecision, SixteenBitsEqualTheUnshardedRunWithTheSameCasts) { for_each_draw<Draw>(100, compare); }

}  // namespace
}  // namespace tessera::test
