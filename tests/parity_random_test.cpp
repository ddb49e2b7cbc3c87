// Random small models, sharded at random, against the unsharded run. TESSERA_TEST_SEED repeats the draw of that seed,
// TESSERA_TEST_DRAWS says how many follow it. A draw that fails is shrunk; TESSERA_TEST_SIMPLER repeats that.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/tessera.h"
#include "tests/support/distances.h"
#include "tests/support/draws.h"
#include "tests/support/on_ranks.h"
#include "tests/support/random_net.h"
#include "tests/support/sharded_helpers.h"

namespace tessera::test {
namespace {

using torch::Tensor;

constexpr int kSteps = 3;

enum class Updates { adamw, fused_adamw, torch_adamw, torch_adam, torch_sgd };
constexpr const char* kUpdates[] = {"AdamW", "fused AdamW", "torch AdamW on shards", "torch Adam on shards",
                                    "torch SGD with momentum on shards"};

/// All that is drawn of a run.
struct Draw {
  explicit Draw(uint64_t seed);
  static std::vector<Simpler<Draw>> simpler();
  std::string description() const;
  bool ours() const { return updates == Updates::adamw || updates == Updates::fused_adamw; }
  bool fused() const { return updates == Updates::fused_adamw; }

  /// Seed of what `rank` reads in a micro-batch, and which optional stages it leaves out there.
  uint64_t data(int step, int micro, int rank) const {
    return seed * 1000 + static_cast<uint64_t>((step * micros + micro) * ranks + rank);
  }
  uint64_t without(int step, int micro, int rank) const;

  uint64_t seed;
  int ranks, micros;
  Placements placements;
  int replicas = 1;  ///< of a hybrid placement
  std::vector<LayoutChoice> layouts;
  Updates updates;
  RandomNetOptions net;
  double unit_share;  ///< of modules that are units
  std::optional<double> clip;
  bool hold_all;   ///< hold accumulating() over the last micro-batch, too
  bool drop;       ///< before each step, gradients of other samples that are dropped
  bool evaluate;   ///< passes without gradients before and after each update
  bool broadcast;  ///< only rank 0 has the right initial values
  bool kept;       ///< units stay gathered after forward
  int64_t resident_below = 0;
  bool annotated;  ///< each parameter has its own placement, drawn too, instead of `placements` and `layouts`
};

Draw::Draw(uint64_t drawn) : seed(drawn) {
  std::mt19937_64 random(seed ^ 0x5eed);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const auto all = every_placement();
  const LayoutKind kinds[] = {flat(),   per_parameter(),   per_parameter(1),  per_parameter(-2),
                              block(1), block(draw(2, 9)), whole_parameters()};
  ranks = draw(1, 5);
  micros = draw(0, 2) == 0 ? draw(2, 3) : 1;
  placements = all[static_cast<size_t>(draw(0, 5))];
  updates = static_cast<Updates>(draw(0, 4));
  net.type = draw(0, 1) == 0 ? torch::kDouble : torch::kFloat;
  unit_share = draw(0, 4) / 4.0;
  if (draw(0, 1) == 0 && !fused()) clip = draw(0, 1) == 0 ? 0.1 : 100.0;
  hold_all = micros > 1 && draw(0, 3) == 0;
  drop = draw(0, 4) == 0 && !fused();
  evaluate = draw(0, 2) == 0;
  broadcast = draw(0, 4) == 0;
  while (!placements.shard_axis.empty() && ranks % (replicas = draw(1, ranks)) != 0) {
  }
  if (draw(0, 1) == 0) layouts.push_back({"*weight", kinds[draw(0, 6)]});
  if (draw(0, 1) == 0) layouts.push_back({"*", kinds[draw(0, 6)]});
  net.optional = draw(0, 1) == 0;
  // An optimizer that updates in backward may refuse a frozen parameter that is used after its unit's gradients have come in
  // an unusual order.
  net.frozen = !(fused() && net.optional) && draw(0, 1) == 0;
  annotated = draw(0, 3) == 0;
  kept = draw(0, 3) == 0;
  if (draw(0, 3) == 0) resident_below = draw(2, 40);
}

std::vector<Simpler<Draw>> Draw::simpler() {
  return {{"one-micro-batch", [](Draw& d) { d.micros = 1, d.hold_all = false; }},
          {"no-units", [](Draw& d) { d.unit_share = 0; }},
          {"not-annotated", [](Draw& d) { d.annotated = false; }},
          {"flat", [](Draw& d) { d.layouts.clear(); }},
          {"sgd", [](Draw& d) { d.updates = Updates::torch_sgd; }},
          {"not-clipped", [](Draw& d) { d.clip.reset(); }},
          {"not-held", [](Draw& d) { d.hold_all = false; }},
          {"not-dropped", [](Draw& d) { d.drop = false; }},
          {"not-evaluated", [](Draw& d) { d.evaluate = false; }},
          {"not-broadcast", [](Draw& d) { d.broadcast = false; }},
          {"not-kept", [](Draw& d) { d.kept = false; }},
          {"not-resident", [](Draw& d) { d.resident_below = 0; }},
          {"fp64", [](Draw& d) { d.net.type = torch::kDouble; }}};
}

uint64_t Draw::without(int step, int micro, int rank) const {
  std::mt19937_64 random(data(step, micro, rank) ^ 0x0b7);
  return net.optional && random() % 2 == 0 ? random() : 0;
}

std::string words_of(const std::vector<LayoutChoice>& layouts) {
  std::string words;
  for (const auto& choice : layouts) words += text("'", choice.pattern, "' ", name_of(choice.layout), ", ");
  return words;
}

std::string Draw::description() const {
  return text("TESSERA_TEST_SEED=", seed, ": ", ranks, " ranks, ", annotated ? "annotated over the axes of " : "",
              name_of(placements), ", ", replicas, " replicas, ", annotated ? "" : words_of(layouts),
              kUpdates[static_cast<int>(updates)], ", ", net.type == torch::kDouble ? "fp64" : "fp32", ", ", micros,
              " micro-batches", hold_all ? " (all held)" : "", drop ? ", others dropped" : "",
              clip ? text(", clipped to ", *clip) : "", ", units ", unit_share, evaluate ? ", evaluated" : "",
              broadcast ? ", broadcast" : "", kept ? ", kept after forward" : "",
              resident_below > 0 ? text(", resident below ", resident_below) : "", "; ",
              RandomNet(seed, net)->description());
}

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(Updates updates, const std::vector<Tensor>& parameters) {
  using namespace torch::optim;
  switch (updates) {
    case Updates::torch_sgd:
      return std::make_unique<SGD>(parameters, SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
    case Updates::torch_adam:
      return std::make_unique<Adam>(parameters, AdamOptions(0.02).betas({0.8, 0.95}).eps(1e-3));
    default:
      return std::make_unique<torch::optim::AdamW>(
          parameters, torch::optim::AdamWOptions(0.02).betas({0.8, 0.95}).eps(1e-3).weight_decay(0.05));
  }
}
const AdamWOptions kAdamW = {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.05};

int64_t rows_of(int rank) { return 2 + rank % 2; }

/// What one step of a run showed; of the losses only this rank's.
struct Seen {
  std::vector<double> losses;
  std::optional<NamedTensors> gradients;
  double norm = 0, before = 0, after = 0;
};

struct Run {
  std::vector<Seen> steps;
  NamedTensors parameters;
  OptimizerState state;
};

template <class Adam>
ParameterState adam_state(const torch::optim::OptimizerParamState& kept) {
  const auto& state = static_cast<const Adam&>(kept);
  return {{{"exp_avg", state.exp_avg()}, {"exp_avg_sq", state.exp_avg_sq()}}, state.step()};
}

/// What torch's optimizer keeps for the parameters of an unsharded net.
OptimizerState state_of(const RandomNet& net, const torch::optim::Optimizer& optimizer, Updates updates) {
  OptimizerState all;
  for (const auto& [name, parameter] : net->unique_parameters()) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    const auto& kept = *found->second;
    if (updates == Updates::torch_sgd)
      all[name] = {{{"momentum_buffer", static_cast<const torch::optim::SGDParamState&>(kept).momentum_buffer()}}, 0};
    else
      all[name] = updates == Updates::torch_adam ? adam_state<torch::optim::AdamParamState>(kept)
                                                 : adam_state<torch::optim::AdamWParamState>(kept);
  }
  return all;
}

NamedTensors copies(const NamedTensors& tensors) {
  NamedTensors all;
  for (const auto& [name, tensor] : tensors) all.emplace_back(name, tensor.defined() ? tensor.detach().clone() : Tensor());
  return all;
}

NamedTensors gradients_of(const RandomNet& net) {
  NamedTensors gradients;
  for (const auto& [name, parameter] : net->unique_parameters()) gradients.emplace_back(name, parameter.grad());
  return copies(gradients);
}

double evaluation_of(RandomNet& net, const Draw& draw) {
  const torch::NoGradGuard no_grad;
  return net->loss(draw.seed, 4, 0).item<double>();
}

Run unsharded(const Draw& draw, int rank) {
  Run run;
  RandomNet net(draw.seed, draw.net);
  std::vector<Tensor> parameters;
  for (const auto& [name, parameter] : net->unique_parameters()) parameters.push_back(parameter);
  const auto optimizer = torch_optimizer(draw.updates, parameters);
  for (int step = 0; step < kSteps; ++step) {
    Seen& seen = run.steps.emplace_back();
    for (int micro = 0; micro < draw.micros; ++micro)
      for (int r = 0; r < draw.ranks; ++r) {
        const auto loss = net->loss(draw.data(step, micro, r), rows_of(r), draw.without(step, micro, r)) / draw.micros;
        if (r == rank) seen.losses.push_back(loss.item<double>());
        (loss / draw.ranks).backward();
      }
    seen.gradients = gradients_of(net);
    if (draw.evaluate) seen.before = evaluation_of(net, draw);
    if (draw.clip) seen.norm = torch::nn::utils::clip_grad_norm_(parameters, *draw.clip);
    optimizer->step();
    optimizer->zero_grad();
    if (draw.evaluate) seen.after = evaluation_of(net, draw);
  }
  run.parameters = copies(net->unique_parameters());
  run.state = state_of(net, *optimizer, draw.updates);
  return run;
}

// Some of the modules, the same on all ranks.
UnitPolicy random_units(const RandomNet& net, const Draw& draw) {
  const UnitPolicy policy = [seed = draw.seed, share = draw.unit_share](const std::string& name, const torch::nn::Module&) {
    uint64_t hash = seed;
    for (const char c : name) hash = (hash ^ static_cast<uint64_t>(c)) * 1099511628211ULL;
    return static_cast<double>(hash >> 40 & 0xffff) < share * 0x10000;
  };
  for (const auto& item : net->named_modules("", /*include_self=*/false))
    if (policy(item.key(), *item.value())) return policy;
  return nullptr;  // a policy that matches nothing is an error
}

// Specs of each parameter and of its optimizer state, tied ones under all their names.
std::pair<Annotations, Annotations> random_annotations(const RandomNet& net, const Draw& draw) {
  const bool two_axes = !draw.placements.shard_axis.empty();
  const DividedOver all = two_axes ? DividedOver{"replicate", "shard"} : DividedOver("data");
  Annotations parameters, state;
  std::map<const at::TensorImpl*, uint64_t> drawn;
  std::mt19937_64 random(draw.seed ^ 0xa770);
  for (const auto& item : net->named_parameters()) {
    const auto dims = static_cast<uint64_t>(item.value().dim());
    const uint64_t number = drawn.emplace(item.value().unsafeGetTensorImpl(), random()).first->second;
    const auto over = [&](const DividedOver& axes) {
      PartitionSpec spec{std::vector<DividedOver>(dims == 0 ? 0 : number / 16 % dims, std::nullopt)};
      spec.dims.push_back(axes);
      return spec;
    };
    const uint64_t kind = dims == 0 ? 0 : number % 8;
    if (kind == 0) continue;  // whole, without an annotation
    const bool some_axes = two_axes && kind > 4;
    parameters.push_back({item.key(), kind < 3 ? P() : over(some_axes ? DividedOver("shard") : all)});
    if (kind > 1) state.push_back({item.key(), over(some_axes && kind > 5 ? DividedOver("shard") : all)});
  }
  return {parameters, state};
}

Sharded shard(RandomNet& net, const Draw& draw, const World& world) {
  const bool hybrids = !draw.placements.shard_axis.empty();
  const Mesh mesh =
      hybrids ? Mesh(world, {{"replicate", draw.replicas}, {"shard", world.size / draw.replicas}}) : Mesh(world);
  ShardOptions options{.units = random_units(net, draw), .initial = draw.broadcast ? Initial::broadcast : Initial::verify};
  options.reshard_after_forward = !draw.kept;
  if (draw.annotated) {
    const auto [parameters, state] = random_annotations(net, draw);
    return annotate(net, mesh, parameters, state, options);
  }
  options.placements = draw.placements;
  options.layouts = draw.layouts;
  options.resident_below = draw.resident_below;
  return fully_shard(net, mesh, options);
}

Run sharded_run(const Draw& draw, const World& world) {
  Run run;
  const int rank = world.rank.value;
  RandomNet net(draw.seed, draw.net);
  if (draw.broadcast && rank > 0) {
    const torch::NoGradGuard no_grad;
    for (auto& [name, parameter] : net->unique_parameters()) parameter.add_(rank);
  }
  auto sharded = shard(net, draw, world);
  std::unique_ptr<AdamW> ours;
  std::unique_ptr<torch::optim::Optimizer> theirs;
  if (draw.ours()) {
    auto options = kAdamW;
    options.fused_reduction = draw.fused();
    ours = std::make_unique<AdamW>(sharded, options);
  } else {
    theirs = torch_optimizer(draw.updates, sharded.parameters());
  }
  for (int step = 0; step < kSteps; ++step) {
    if (draw.drop) {
      net->loss(draw.seed + 1 + static_cast<uint64_t>(rank), 2, 0).backward();
      sharded.zero_grad();
    }
    Seen& seen = run.steps.emplace_back();
    for (int micro = 0; micro < draw.micros; ++micro) {
      const auto loss =
          net->loss(draw.data(step, micro, rank), rows_of(rank), draw.without(step, micro, rank)) / draw.micros;
      seen.losses.push_back(loss.item<double>());
      std::optional<Sharded::Accumulating> held;
      if (draw.hold_all || micro + 1 < draw.micros) held.emplace(sharded.engine());
      loss.backward();
    }
    if (!draw.fused()) seen.gradients = copies(sharded.full_gradients());
    if (draw.evaluate && !draw.fused()) seen.before = evaluation_of(net, draw);  // a fused update may have happened
    if (draw.clip) seen.norm = sharded.clip_grad_norm(*draw.clip);
    if (ours) {
      ours->step();
      ours->zero_grad();
    } else {
      theirs->step();
      theirs->zero_grad();
    }
    if (draw.evaluate) seen.after = evaluation_of(net, draw);
  }
  run.parameters = sharded.full_parameters();
  run.state = ours ? full_state(sharded, *ours) : full_state(sharded, *theirs);
  for (const auto& unit : sharded.engine().units()) EXPECT_EQ(unit->lent, Bytes(0)) << unit->name();
  return run;
}

Distances distances(const Draw& draw, const Run& run, const Run& wanted) {
  Distances all;
  for (size_t s = 0; s < kSteps; ++s) {
    const std::string step = text(" in step ", s + 1);
    const Seen &mine = run.steps[s], &theirs = wanted.steps[s];
    for (size_t m = 0; m < theirs.losses.size(); ++m)
      all.emplace_back(text("loss ", m, step), distance(mine.losses[m], theirs.losses[m]));
    if (mine.gradients) add_distances(all, "gradient" + step, *mine.gradients, *theirs.gradients);
    all.emplace_back("norm" + step, distance(mine.norm, theirs.norm));
    if (!draw.fused()) all.emplace_back("evaluation before the update" + step, distance(mine.before, theirs.before));
    all.emplace_back("evaluation after the update" + step, distance(mine.after, theirs.after));
  }
  add_distances(all, "parameter", run.parameters, wanted.parameters);
  add_distances(all, run.state, wanted.state);
  return all;
}

// Some draws make more of rounding than others. How far the unsharded fp32 run is from the exact one says how far two fp32
// runs may be from each other.
double tolerance_of(const Draw& draw, const World& world, const Run& plain) {
  if (draw.net.type == torch::kDouble) return 1e-12;
  Draw exact = draw;
  exact.net.type = torch::kDouble;
  double most = 0;
  for (const auto& [what, distance] : distances(draw, plain, unsharded(exact, world.rank.value)))
    most = std::max(most, distance);
  return std::max(1e-6, 2 * most);
}

void compare(const Draw& draw, const World& world) {
  const Run plain = unsharded(draw, world.rank.value), sharded = sharded_run(draw, world);
  const double tolerance = tolerance_of(draw, world, plain);
  EXPECT_LE(tolerance, 1e-4) << "a draw that shows little";
  for (const auto& [what, distance] : distances(draw, sharded, plain)) EXPECT_LE(distance, tolerance) << what;
}

TEST(ParityRandom, AnyModelAnyPlacementEqualsTheUnshardedRun) { for_each_draw<Draw>(300, compare); }

// A parameter whose gradient comes in one micro-batch of a step and not in the last is rare among the draws, so it has draws
// of its own.
TEST(ParityRandom, UpdatesInBackwardCountTheGradientsOfEarlierMicroBatches) {
  at::set_num_threads(1);
  for (const auto& placements : {ddp(), zero1(), zero2(), zero3()})
    for (uint64_t seed = 0; seed < 12; ++seed) {
      Draw draw(seed);
      draw.ranks = static_cast<int>(1 + seed % 3);
      draw.micros = 3;
      draw.placements = placements;
      draw.annotated = false;
      draw.updates = Updates::fused_adamw;
      draw.net = {.type = torch::kDouble, .frozen = false, .optional = true};
      draw.unit_share = 1;
      draw.clip = std::nullopt;
      draw.hold_all = draw.drop = false;
      SCOPED_TRACE(draw.description());
      on_ranks(draw.ranks, [&](World world) { compare(draw, world); });
      if (HasFailure()) return;
    }
}

}  // namespace
}  // namespace tessera::test
