// What observing parameter access costs: steps of a small model, where the operators are short, on one rank, of three kinds
// by turns:
//   plain      the model as it is
//   observed   its parameters carry the observer's key, and what is told of each access does nothing
//   sharded    zero3 on one rank: the engine gathers, releases, hands gradients over, and keeps its order
// Each kind has the same model, batch, allocator and AdamW kernel. Prints JSON: medians, and the medians of what a step of
// the other kinds takes longer than the plain step beside it.
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/arguments.h"
#include "bench/local_adamw.h"
#include "models/llama.h"
#include "models/synthetic_data.h"
#include "tessera/engine/observer.h"
#include "tessera/storage/guarded_storage.h"
#include "tessera/tessera.h"

namespace tessera::bench {
namespace {

using nlohmann::json;

struct Ignore final : AccessHandler {
  void before(std::span<const Access>, std::string_view) override {}
  void after(std::span<const Access>, std::span<const c10::IValue>, std::string_view) override {}
  bool wants_results() const override { return false; }
};

/// Moves a model's parameters into one guarded storage, always attached, whose accesses nobody uses.
class ObservedParameters {
 public:
  explicit ObservedParameters(torch::nn::Module& module) {
    register_observer();
    const torch::NoGradGuard no_grad;
    int64_t elements = 0;
    for (const auto& parameter : module.parameters()) elements += parameter.numel();
    memory_ = torch::empty({elements});
    storage_ = std::make_unique<GuardedStorage>(Bytes(elements * 4), at::kCPU, &observed_, "never detached");
    storage_->attach(memory_.data_ptr());
    int64_t offset = 0;
    for (auto& parameter : module.parameters()) {
      memory_.narrow(0, offset, parameter.numel()).copy_(parameter.view(-1));
      parameter.set_data(storage_->view(parameter.sizes(), offset, at::kFloat));
      offset += parameter.numel();
    }
  }

 private:
  Ignore ignore_;
  Observed observed_{&ignore_, Observed::Kind::unit, 0};
  torch::Tensor memory_;
  std::unique_ptr<GuardedStorage> storage_;
};

models::Llama small_model(const models::LlamaConfig& config) {
  torch::manual_seed(0);
  return models::Llama(config);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// One kind of training; `finish` does what follows backward.
struct Kind {
  const char* name;
  models::Llama model;
  std::function<void()> finish;
  std::vector<double> step_ms{}, losses{};
  int64_t operators = 0;

  void step(const torch::Tensor& tokens) {
    const int64_t before = operators_observed();
    const auto start = std::chrono::steady_clock::now();
    const auto loss = model->loss(tokens);
    losses.push_back(loss.item<double>());
    loss.backward();
    finish();
    step_ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    operators = operators_observed() - before;
  }
};

json report(const std::vector<Kind>& kinds, size_t warmup) {
  const auto timed = [&](const Kind& kind) {
    return std::vector<double>(kind.step_ms.begin() + static_cast<int64_t>(warmup), kind.step_ms.end());
  };
  const auto plain = timed(kinds[0]);
  json result;
  for (const auto& kind : kinds) {
    auto longer = timed(kind);
    const double step_ms = median(longer);
    for (size_t i = 0; i < longer.size(); ++i) longer[i] -= plain[i];
    result[kind.name] = {{"step_ms", step_ms},
                         {"longer_percent", 100 * median(longer) / median(plain)},
                         {"operators_observed", kind.operators},
                         {"last_loss", kind.losses.back()}};
  }
  return result;
}

json run(const Arguments& arguments) {
  at::set_num_threads(1);
  models::LlamaConfig config;
  config.layers = arguments.number("layers");
  config.width = arguments.number("width");
  config.heads = config.kv_heads = arguments.number("heads");
  config.hidden = arguments.number("hidden");
  config.vocab = arguments.number("vocab");
  config.context = arguments.number("context");

  // The sharded model first: it installs the allocator for all.
  const World world = World::from_env();
  if (world.size != 1) throw ConfigError("this measures one rank; start it without a launcher");
  models::Llama sharded_model = small_model(config), plain_model = small_model(config), observed_model = small_model(config);
  Sharded sharded =
      fully_shard(sharded_model, Mesh(world), {.placements = zero3(), .units = units_of<models::LlamaBlockImpl>()});
  AdamW sharded_optimizer(
      sharded, {.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .fused_reduction = true});
  const ObservedParameters observed(*observed_model);
  LocalAdamW plain_optimizer(plain_model->parameters(), Rank(0), 1),
      observed_optimizer(observed_model->parameters(), Rank(0), 1);

  std::vector<Kind> kinds{{"plain", plain_model, [&] { plain_optimizer.step(); }},
                          {"observed", observed_model, [&] { observed_optimizer.step(); }},
                          {"sharded", sharded_model, [&] {
                             sharded_optimizer.step();
                             sharded_optimizer.zero_grad();
                           }}};
  const models::SyntheticData data(config.vocab, config.context, 0);
  const auto steps = arguments.number("steps"), warmup = arguments.number("warmup");
  for (int64_t step = 0; step < warmup + steps; ++step) {
    const auto tokens = data.batch(step, Rank(0), 1, arguments.number("batch"));
    // Each kind comes after each other kind equally often.
    static constexpr std::array<std::array<size_t, 3>, 6> kOrders{
        {{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {0, 2, 1}, {2, 0, 1}, {1, 0, 2}}};
    for (const size_t kind : kOrders[static_cast<size_t>(step) % kOrders.size()]) kinds[kind].step(tokens);
  }
  return report(kinds, static_cast<size_t>(warmup));
}

}  // namespace
}  // namespace tessera::bench

int main(int count, char** words) {
  try {
    const auto result = tessera::bench::run({count,
                                             words,
                                             {{"layers", "6"},
                                              {"width", "64"},
                                              {"heads", "4"},
                                              {"hidden", "256"},
                                              {"vocab", "256"},
                                              {"context", "64"},
                                              {"batch", "4"},
                                              {"steps", "300"},
                                              {"warmup", "20"}}});
    std::printf("%s\n", result.dump().c_str());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "observer_bench: %s\n", error.what());
    return 1;
  }
}
