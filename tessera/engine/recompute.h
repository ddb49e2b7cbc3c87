#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// Computes `function(inputs)` without keeping what its backward needs; backward computes it once more (activation
/// checkpointing: Chen et al. 2016, "Training deep nets with sublinear memory cost"). Memory: the inputs; time: one more
/// forward. The second time sees the same random state and the same autocast state as the first. May be nested, and works
/// with and without sharding. Parameters that `function` uses need not be inputs. `function` must live, and compute the
/// same, until backward, and ranks must recompute the same parts as often. Without GradMode it is a plain call. Backward
/// throws GuardError under torch::autograd::grad, with `inputs`, or with create_graph.
std::vector<at::Tensor> recompute_all(std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
                                      std::vector<at::Tensor> inputs);

/// The same for anything that takes tensors and returns a tensor or a vector of tensors: a function, or a module, which is
/// kept alive until backward: `x = tessera::recompute(block, x)`.
template <class Function, class... Inputs>
auto recompute(Function function, const Inputs&... inputs) {
  static_assert((std::is_convertible_v<const Inputs&, at::Tensor> && ...), "recompute takes tensors");
  constexpr bool is_holder = requires { function.ptr(); };
  auto call = [function](const auto&... tensors) mutable {
    if constexpr (is_holder)
      return function->forward(tensors...);
    else
      return function(tensors...);
  };
  using Result = decltype(call(static_cast<const at::Tensor&>(inputs)...));
  auto with_vector = [call]<size_t... I>(std::index_sequence<I...>, const std::vector<at::Tensor>& tensors) mutable {
    return call(tensors[I]...);
  };
  auto outputs = recompute_all(
      [with_vector](const std::vector<at::Tensor>& tensors) mutable -> std::vector<at::Tensor> {
        if constexpr (std::is_convertible_v<Result, at::Tensor>)
          return {with_vector(std::index_sequence_for<Inputs...>(), tensors)};
        else
          return with_vector(std::index_sequence_for<Inputs...>(), tensors);
      },
      {inputs...});
  if constexpr (std::is_convertible_v<Result, at::Tensor>)
    return std::move(outputs[0]);
  else
    return outputs;
}

}  // namespace tessera
