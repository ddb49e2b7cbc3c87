#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/tessera.h"

namespace tessera::test {

/// Four linear layers of 8×8, named "b0" to "b3", with something that a test does before one of them.
struct StackImpl : torch::nn::Module {
  StackImpl() {
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i) layers.push_back(register_module(text("b", i), torch::nn::Linear(8, 8)));
  }

  /// Calls `in_forward` before layer 2 computes, and `in_backward` when its gradient has been computed.
  torch::Tensor forward(torch::Tensor x, const std::function<void()>& in_forward = {},
                        const std::function<void()>& in_backward = {}) {
    for (size_t i = 0; i < layers.size(); ++i) {
      if (i == 2 && in_forward) in_forward();
      if (i == 2 && in_backward) x.register_hook([in_backward](const torch::Tensor&) { in_backward(); });
      x = torch::tanh(layers[i](x));
    }
    return x;
  }

  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Stack);

/// Each layer a unit.
inline ShardOptions stack_options(const Placements& placements) {
  return {.placements = placements,
          .units = [](const std::string& name, const torch::nn::Module&) { return name.size() == 2; }};
}

/// The loss of rank `rank`'s samples.
inline torch::Tensor stack_loss(Stack& net, int rank, const std::function<void()>& in_forward = {},
                                const std::function<void()>& in_backward = {}) {
  return net->forward(torch::full({3, 8}, 0.1 * (rank + 1)), in_forward, in_backward).pow(2).mean();
}

}  // namespace tessera::test
