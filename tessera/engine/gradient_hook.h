#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/layout/layout.h"

namespace tessera {

class Engine;

/// Sees, and may change in place, this rank's part of a parameter's reduced gradient; see Sharded::on_reduced_gradient.
using ReducedGradientHook = std::function<void(const std::string& name, at::Tensor& gradient)>;

/// Tells the engine that a gradient has been accumulated, after what the user may have had there (a tensor has one place for
/// such a hook).
class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  /// Puts one there, unless there is one of this engine. What was there goes on being called.
  static void put(Engine& engine, const at::Tensor& parameter, uint32_t unit, ParameterIndex index);
  /// Takes it away, and leaves what was there before.
  static void take_away(Engine& engine, const at::Tensor& parameter);

  void operator()(const at::Tensor& parameter) override;

 private:
  Engine* engine_ = nullptr;
  uint32_t unit_ = 0;
  ParameterIndex index_ = 0;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> own_;  // the user's
};

}  // namespace tessera
