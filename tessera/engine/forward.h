#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// What floating-point tensors are converted to where they enter and leave a module; unset: they stay as they are.
struct BorderTypes {
  std::optional<c10::ScalarType> input, output;
};

/// Those that the Precision says with which `module`'s parameters are sharded; none for a module without sharded parameters.
/// O(modules).
BorderTypes border_types(const torch::nn::Module& module);

inline at::Tensor cast_floating(const at::Tensor& tensor, c10::ScalarType type) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(type) : tensor;
}

template <class T>
T cast_floating(const T& value, c10::ScalarType type);
template <class T>
std::optional<T> cast_floating(const std::optional<T>& value, c10::ScalarType type) {
  return value ? std::optional<T>(cast_floating(*value, type)) : value;
}
template <class T>
std::vector<T> cast_floating(const std::vector<T>& values, c10::ScalarType type) {
  std::vector<T> all;
  for (const auto& value : values) all.push_back(cast_floating(value, type));
  return all;
}
template <class Key, class T>
std::map<Key, T> cast_floating(const std::map<Key, T>& values, c10::ScalarType type) {
  std::map<Key, T> all;
  for (const auto& [key, value] : values) all.emplace(key, cast_floating(value, type));
  return all;
}
template <class First, class Second>
std::pair<First, Second> cast_floating(const std::pair<First, Second>& values, c10::ScalarType type) {
  return {cast_floating(values.first, type), cast_floating(values.second, type)};
}
template <class... T>
std::tuple<T...> cast_floating(const std::tuple<T...>& values, c10::ScalarType type) {
  return std::apply([&](const T&... each) { return std::tuple<T...>(cast_floating(each, type)...); }, values);
}
/// Anything else is no tensor: it stays as it is.
template <class T>
T cast_floating(const T& value, c10::ScalarType) {
  return value;
}

/// `module.forward(inputs…)` with the casts of ShardOptions::precision at its border, as FSDP2's MixedPrecisionPolicy has
/// them: floating-point tensors among the inputs become `working` (unless cast_inputs is false), those among the outputs
/// `output`. They are looked for in optionals, vectors, maps, pairs and tuples; members of other types are not. Autograd
/// goes through the casts, so gradients come back in the type of the input. libtorch calls a module's `forward` directly, so
/// nothing can be put in between: write this where the call is, `y = tessera::forward(model, x)`, and inside a model for
/// units of which it is wanted. A module that is not sharded is called as it is.
template <class Module, class... Inputs>
auto forward(Module&& module, const Inputs&... inputs) {
  auto& impl = [&]() -> auto& {
    if constexpr (requires { module.ptr(); })
      return *module;
    else
      return module;
  }
  ();
  const BorderTypes types = border_types(impl);
  const auto enter = [&]<class T>(const T& input) -> T { return types.input ? cast_floating(input, *types.input) : input; };
  auto output = impl.forward(enter(inputs)...);
  return types.output ? cast_floating(output, *types.output) : output;
}

}  // namespace tessera
