// Shards a model of its own. One process: ./own_model. Two: tessera launch -n 2 -- ./own_model (or torchrun --nproc-per-node
// 2).
#include <torch/torch.h>

#include <cstdio>

#include "tessera/tessera.h"

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t width, int64_t blocks_count) {
    for (int64_t i = 0; i < blocks_count; ++i) blocks->push_back(Block(width));
    register_module("blocks", blocks);
    register_module("head", head = torch::nn::Linear(width, 1));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head(x).squeeze(-1);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

int main() try {
  const auto world = tessera::World::from_env();
  torch::manual_seed(0);  // the same initial values on all ranks
  Net model(64, 4);
  auto sharded = tessera::fully_shard(model, tessera::Mesh(world),
                                      {.placements = tessera::zero3(), .units = tessera::units_of<BlockImpl>()});
  tessera::AdamW optimizer(sharded, {.lr = 3e-3});

  torch::manual_seed(1 + world.rank.value);  // different data on each
  double loss_value = 0;
  for (int step = 0; step < 50; ++step) {
    const auto x = torch::randn({32, 64});
    auto loss = (model(x) - x.sum(-1).sin()).pow(2).mean();
    loss.backward();
    sharded.clip_grad_norm(1.0);
    optimizer.step();
    optimizer.zero_grad();
    loss_value = loss.item<double>();
    if (step == 0 && world.rank.value == 0) std::printf("first loss %.3f\n", loss_value);
  }
  const auto bytes = sharded.state_bytes();
  std::printf("rank %d of %d: last loss %.3f; holds %.0f bytes of state for %lld parameters\n", world.rank.value, world.size,
              loss_value, bytes.parameters + bytes.gradients + bytes.optimizer,
              static_cast<long long>(sharded.parameter_count()));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
