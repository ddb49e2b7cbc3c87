// The floor under a sharded step: ranks that train the same model side by side and exchange nothing, with the arenas that
// training uses, and the optimizer over 1/ranks of the elements. Only the start and the end are collective. Start it as
// `tessera launch -n 2 -- floor --steps 22 --json FILE`. Its parameters lie in the arena, too: on huge pages where the
// system gives them.
//   --update end        gradients stay until backward has ended, then the optimizer reads them and they are dropped
//   --update backward   each is used and dropped as soon as it is there, while the caches hold it
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/arguments.h"
#include "bench/local_adamw.h"
#include "models/llama.h"
#include "models/synthetic_data.h"
#include "tessera/engine/arena_lease.h"
#include "tessera/mesh/world.h"

namespace tessera::bench {
namespace {

using nlohmann::json;

struct UpdateHook final : torch::autograd::PostAccumulateGradHook {
  UpdateHook(LocalAdamW* optimizer, size_t index) : optimizer(optimizer), index(index) {}
  void operator()(const torch::autograd::Variable&) override { optimizer->update(index); }

  LocalAdamW* optimizer;
  size_t index;
};

models::LlamaConfig config_of(const Arguments& arguments) {
  models::LlamaConfig config;
  config.layers = arguments.number("layers");
  config.width = arguments.number("width");
  config.heads = config.kv_heads = arguments.number("heads");
  config.hidden = arguments.number("hidden");
  config.vocab = arguments.number("vocab");
  config.context = arguments.number("context");
  return config;
}

bool updates_in_backward(const Arguments& arguments) {
  const std::string& update = arguments.word("update");
  if (update != "end" && update != "backward")
    throw ConfigError(text("option update must be end or backward, but is '", update, "'"));
  return update == "backward";
}

json train(const Arguments& arguments, const World& world, Arena& arena) {
  const bool in_backward = updates_in_backward(arguments);
  const auto seed = static_cast<uint64_t>(arguments.number("seed"));
  torch::manual_seed(seed);
  models::Llama model(config_of(arguments));
  const models::SyntheticData data(model->config().vocab, model->config().context, seed);
  LocalAdamW optimizer(model->parameters(), world.rank, world.size);
  for (size_t i = 0; in_backward && i < optimizer.size(); ++i)
    torch::autograd::impl::set_post_acc_grad_hooks(optimizer.parameter(i), std::make_unique<UpdateHook>(&optimizer, i));
  arena.trim();
  SharedMemory::connect(world)->barrier("the floor begins");

  std::vector<double> step_ms, losses;
  for (int64_t step = 0; step < arguments.number("steps"); ++step) {
    const auto start = std::chrono::steady_clock::now();
    const auto loss = model->loss(data.batch(step, world.rank, world.size, arguments.number("batch")));
    losses.push_back(loss.item<double>());
    loss.backward();
    if (!in_backward) optimizer.step();
    arena.age();
    step_ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  int64_t elements = 0;
  for (const auto& parameter : model->parameters()) elements += parameter.numel();
  return {{"step_ms", step_ms}, {"loss", losses}, {"parameters", elements}};
}

void write(const std::string& path, const json& result) {
  if (path.empty()) {
    std::printf("%s\n", result.dump().c_str());
    return;
  }
  std::ofstream file(path);
  file << result.dump() << '\n';
  if (!file.flush()) throw SystemError(text("can't write ", path));
}

void run(const Arguments& arguments) {
  const World world = World::from_env();
  at::set_num_threads(static_cast<int>(arguments.number("threads-per-rank")));
  const auto communicator = SharedMemory::connect(world);
  const auto lease = ArenaLease::take(communicator);
  try {
    json per_rank = json::array();
    for (const auto& rank : communicator->all_gather("the floor's results", train(arguments, world, lease->arena()).dump()))
      per_rank.push_back(json::parse(rank));
    if (world.rank.value == 0) write(arguments.word("json"), {{"update", arguments.word("update")}, {"per_rank", per_rank}});
  } catch (const std::exception& error) {
    communicator->fail(error.what());
    throw;
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int count, char** words) {
  try {
    tessera::bench::run({count,
                         words,
                         {{"layers", "8"},
                          {"width", "768"},
                          {"heads", "12"},
                          {"hidden", "2048"},
                          {"vocab", "8192"},
                          {"context", "64"},
                          {"batch", "1"},
                          {"steps", "22"},
                          {"seed", "0"},
                          {"threads-per-rank", "1"},
                          {"update", "end"},
                          {"json", ""}}});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "floor: %s\n", error.what());
    return 1;
  }
}
