#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/unit.h"

namespace torch::jit {
struct Module;
}

namespace tessera {

/// A module inside a model, of either kind, as unit policies see it.
struct Submodule {
  std::string name;                ///< dotted, from the model
  std::string type;                ///< of its class; a TorchScript class without its package
  int64_t elements = 0;            ///< of its parameters, those of its children included
  int64_t largest_child = 0;       ///< elements of the largest of its children
  const torch::nn::Module* plain;  ///< nullptr in a TorchScript model
};

/// What sharding needs to know of a model, whatever its class.
struct ModuleTree {
  std::string type;
  bool script = false;                     ///< a TorchScript model
  std::vector<Submodule> submodules;       ///< without the model itself, parents before children
  std::vector<NamedParameter> parameters;  ///< in the order of the model; tied ones under each of their names
  std::vector<NamedParameter> buffers;
  ParametersNow now;  ///< of the model
};

/// O(parameters · depth).
ModuleTree tree_of(const torch::nn::Module& module);
ModuleTree tree_of(const torch::jit::Module& module);

/// Says which modules become units of their own: by dotted name and module (torch::nn models only), or by what Submodule
/// says (any model). Parameters of no unit belong to the root unit, and those of nested units to the innermost.
class UnitPolicy {
 public:
  UnitPolicy(std::nullptr_t = nullptr) {}
  template <std::predicate<const std::string&, const torch::nn::Module&> Function>
  UnitPolicy(Function function)
      : chosen_([function = std::move(function)](const Submodule& submodule) {
          return function(submodule.name, plain(submodule));
        }) {}
  template <std::predicate<const Submodule&> Function>
  UnitPolicy(Function function) : chosen_(std::move(function)) {}

  explicit operator bool() const { return chosen_ != nullptr; }
  bool operator()(const Submodule& submodule) const { return chosen_(submodule); }
  bool operator()(const std::string& name, const torch::nn::Module& module) const;  ///< for policies made of others

 private:
  static const torch::nn::Module& plain(const Submodule& submodule);  // throws ConfigError if there is none

  std::function<bool(const Submodule&)> chosen_;
};

/// Every module of type `Impl` (a transformer block, say) is a unit.
template <class Impl>
UnitPolicy units_of() {
  return [](const std::string&, const torch::nn::Module& module) { return dynamic_cast<const Impl*>(&module) != nullptr; };
}

/// Modules whose dotted names match one of `patterns` (fnmatch: `*` any characters) are units.
UnitPolicy units_named(std::vector<std::string> patterns);

/// Modules whose class has one of these names are units: what units_of is for TorchScript models, whose classes exist only
/// in their files. torch::nn's own names are those of Module::name().
UnitPolicy units_of_type(std::vector<std::string> types);

/// The smallest modules that have at least `elements` parameter elements, those of their children included, are units.
UnitPolicy units_of_size(int64_t elements);

}  // namespace tessera
