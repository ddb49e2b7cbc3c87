#include "tessera/engine/recompute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/custom_class.h>

#include "tessera/base/error.h"
#include "tessera/engine/backward_end.h"

namespace tessera {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a computation depends on beside its inputs.
class Surroundings {
 public:
  Surroundings()
      : random_(generator().get_state()),
        autocast_(at::autocast::is_autocast_enabled(at::kCPU)),
        autocast_type_(at::autocast::get_autocast_dtype(at::kCPU)) {}

  void restore() const {
    auto random = generator();
    {
      const std::lock_guard lock(random.mutex());
      random.set_state(random_);
    }
    at::autocast::set_autocast_enabled(at::kCPU, autocast_);
    at::autocast::set_autocast_dtype(at::kCPU, autocast_type_);
  }

 private:
  static at::Generator generator() { return at::detail::getDefaultCPUGenerator(); }

  Tensor random_;
  bool autocast_;
  at::ScalarType autocast_type_;
};

/// Puts the surroundings of the first computation in place, and the present ones back at the end.
class Restored {
 public:
  explicit Restored(const Surroundings& first) { first.restore(); }
  ~Restored() { now_.restore(); }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  Surroundings now_;
};

struct Computation : torch::CustomClassHolder {
  explicit Computation(std::function<variable_list(const variable_list&)> f) : function(std::move(f)) {}
  std::function<variable_list(const variable_list&)> function;
  Surroundings surroundings;
};

class Recompute : public torch::autograd::Function<Recompute> {
 public:
  // `anchor` requires a gradient, so that backward comes here even if no input does.
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Computation>& computation,
                               const Tensor& /*anchor*/, at::TensorList inputs) {
    context->saved_data["computation"] = c10::IValue::make_capsule(computation);
    context->save_for_backward(inputs.vec());
    const at::NoGradGuard no_grad;
    return computation->function(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_partial_backward();
    const auto computation = c10::static_intrusive_pointer_cast<Computation>(context->saved_data["computation"].toCapsule());
    variable_list inputs;
    for (const auto& input : context->get_saved_variables()) {
      inputs.push_back(input.defined() ? input.detach() : input);
      if (input.defined()) inputs.back().set_requires_grad(input.requires_grad());
    }
    const NestedBackward nested;
    run(*computation, inputs, gradients);
    variable_list result(2);  // none for the computation and the anchor
    for (const auto& input : inputs) result.push_back(input.defined() ? input.grad() : Tensor());
    return result;
  }

 private:
  // The backward inside adds to the gradients of all parameters, and leaves no graph.
  static void refuse_partial_backward() {
    if (at::GradMode::is_enabled())
      throw GuardError(
          "backward with create_graph came through tessera::recompute, which can't be differentiated twice; call the "
          "function "
          "itself where second-order gradients are taken");
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid())
      throw GuardError(
          "torch::autograd::grad, or backward with `inputs`, came through tessera::recompute, which gives gradients to all "
          "parameters that it uses; call backward() without inputs, or the function itself instead of recomputing it");
  }

  static void run(Computation& computation, const variable_list& inputs, const variable_list& gradients) {
    const at::AutoGradMode grad(true);
    variable_list outputs, with;
    {
      const Restored restored(computation.surroundings);
      const auto all = computation.function(inputs);
      if (all.size() != gradients.size())
        throw ConfigError("a recomputed function returned another number of tensors the second time");
      for (size_t i = 0; i < all.size(); ++i)
        if (all[i].defined() && all[i].requires_grad() && gradients[i].defined()) {
          outputs.push_back(all[i]);
          with.push_back(gradients[i]);
        }
    }
    if (!outputs.empty()) torch::autograd::backward(outputs, with);
  }
};

}  // namespace

variable_list recompute_all(std::function<variable_list(const variable_list&)> function, variable_list inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto computation = c10::make_intrusive<Computation>(std::move(function));
  const Tensor anchor = at::empty({0}).set_requires_grad(true);
  return Recompute::apply(computation, anchor, at::TensorList(inputs));
}

}  // namespace tessera
