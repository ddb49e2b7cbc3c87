#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace tessera {

class Tape;

/// While it lives, what this thread builds takes no memory: tensors that operators make have shapes, types and strides, but
/// no values. The operators are recorded, and `fully_shard` runs them again, a unit at a time; `materialize` runs all. The
/// values are those of construction without it, bit for bit, and so is the random stream afterwards.
///
///     std::shared_ptr<Net> net;
///     { const tessera::Deferred deferred; net = std::make_shared<Net>(…); }
///     auto sharded = tessera::fully_shard(*net, mesh, {.units = …});
///
/// What is recorded: every operator that makes or writes tensors without values, on views too. Values of other tensors are
/// copied when an operator reads them. What can't be is a ConfigError that names the operator and says what to do: reading
/// values (item()), writing them to tensors that have theirs, resizing, updates of running statistics, devices other than
/// the CPU. Reading memory (data_ptr(), torch::tensor of a vector) is a c10::Error; Pause is for that. Outside of the scope
/// tensors without values can be viewed by detach, assigned and counted, but not computed with: a GuardError that names the
/// parameter, if it was built by `deferred`. A draw of random numbers costs its time and its tensor's memory during
/// construction too, since it moves the generator, and 2.5 KB until the values are there. Scopes nest. They end on the
/// thread where they began. Not thread-safe besides: a deferred model is given its values, and members without values are
/// met first, on one thread at a time.
class Deferred {
 public:
  Deferred();
  ~Deferred();
  Deferred(const Deferred&) = delete;
  Deferred& operator=(const Deferred&) = delete;

  /// Within a scope: what is built while it lives has values at once.
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    bool excluded_;
  };

 private:
  std::shared_ptr<Tape> tape_;
  bool included_, excluded_;
};

/// Gives errors about a deferred module's tensors their names.
void name_deferred(const torch::nn::Module& module);

/// The same for a module whose tensors are about to get their values.
void settle_deferred(const torch::nn::Module& module);

/// What `build` returns (a module, a holder or a pointer), built under Deferred, its tensors named:
/// `auto net = tessera::deferred([&] { return Net(config); });`
template <class Build>
auto deferred(Build&& build) {
  auto built = [&] {
    const Deferred scope;
    return std::forward<Build>(build)();
  }();
  if constexpr (requires { static_cast<const torch::nn::Module&>(built); })
    name_deferred(built);
  else
    name_deferred(*built);
  return built;
}

/// Gives all of a module's deferred parameters and buffers their values. Members that are not registered get theirs when
/// they are first used by an operator. Does nothing to others.
void materialize(const torch::nn::Module& module);
/// The same for single tensors, and for all that view their memory.
void materialize(std::span<const at::Tensor> tensors);

/// Tensors with the values of `tensors`, which stay deferred; one that has values is returned itself.
std::vector<at::Tensor> values_of(std::span<const at::Tensor> tensors);

}  // namespace tessera
