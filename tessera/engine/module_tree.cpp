#include "tessera/engine/module_tree.h"

#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/pattern.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

std::string parent_of(const std::string& name) {
  const size_t end = name.rfind('.');
  return end == std::string::npos ? "" : name.substr(0, end);
}

std::vector<NamedParameter> parameters_of(const torch::nn::Module& module) {
  std::vector<NamedParameter> all;
  for (const auto& item : module.named_parameters()) all.push_back({item.key(), item.value()});
  return all;
}

std::vector<NamedParameter> parameters_of(const torch::jit::Module& module) {
  std::vector<NamedParameter> all;
  for (const auto& item : module.named_parameters()) all.push_back({item.name, item.value});
  return all;
}

// Counts each parameter for all modules that it lies in.
void count_elements(ModuleTree& tree) {
  std::map<std::string, Submodule*> by_name;
  for (auto& submodule : tree.submodules) by_name[submodule.name] = &submodule;
  for (const auto& parameter : tree.parameters)
    if (parameter.tensor.defined())
      for (std::string at = parent_of(parameter.name); !at.empty(); at = parent_of(at))
        if (const auto found = by_name.find(at); found != by_name.end()) found->second->elements += parameter.tensor.numel();
  for (const auto& child : tree.submodules)
    if (const auto found = by_name.find(parent_of(child.name)); found != by_name.end())
      found->second->largest_child = std::max(found->second->largest_child, child.elements);
}

}  // namespace

ModuleTree tree_of(const torch::nn::Module& module) {
  ModuleTree tree;
  tree.type = module.name();
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    tree.submodules.push_back({.name = item.key(), .type = item.value()->name(), .plain = item.value().get()});
  tree.parameters = parameters_of(module);
  for (const auto& item : module.named_buffers()) tree.buffers.push_back({item.key(), item.value()});
  tree.now = [model = module.weak_from_this()] {
    const auto there = model.lock();
    return there ? parameters_of(*there) : std::vector<NamedParameter>();
  };
  count_elements(tree);
  return tree;
}

ModuleTree tree_of(const torch::jit::Module& module) {
  const auto type_of = [](const torch::jit::Module& m) { return m.type()->name()->name(); };
  ModuleTree tree;
  tree.type = type_of(module);
  tree.script = true;
  for (const auto& item : module.named_modules())
    if (!item.name.empty()) tree.submodules.push_back({.name = item.name, .type = type_of(item.value), .plain = nullptr});
  tree.parameters = parameters_of(module);
  for (const auto& item : module.named_buffers()) tree.buffers.push_back({item.name, item.value});
  tree.now = [module] { return parameters_of(module); };
  count_elements(tree);
  return tree;
}

bool UnitPolicy::operator()(const std::string& name, const torch::nn::Module& module) const {
  const auto elements_of = [](const torch::nn::Module& of) {
    int64_t count = 0;
    for (const auto& parameter : of.parameters()) count += parameter.numel();
    return count;
  };
  Submodule submodule{.name = name, .type = module.name(), .elements = elements_of(module), .plain = &module};
  for (const auto& child : module.children())
    submodule.largest_child = std::max(submodule.largest_child, elements_of(*child));
  return chosen_(submodule);
}

const torch::nn::Module& UnitPolicy::plain(const Submodule& submodule) {
  if (submodule.plain == nullptr)
    throw ConfigError(text("the unit policy looks at torch::nn::Module, but '", submodule.name,
                           "' is a TorchScript module (", submodule.type,
                           "); use units_named, units_of_type, units_of_size or a function of const tessera::Submodule&"));
  return *submodule.plain;
}

UnitPolicy units_named(std::vector<std::string> patterns) {
  return [patterns = std::move(patterns)](const Submodule& submodule) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&](const auto& pattern) { return matches(pattern, submodule.name); });
  };
}

UnitPolicy units_of_type(std::vector<std::string> types) {
  return [types = std::move(types)](const Submodule& submodule) {
    return std::find(types.begin(), types.end(), submodule.type) != types.end();
  };
}

UnitPolicy units_of_size(int64_t elements) {
  return [elements](const Submodule& submodule) {
    return submodule.elements >= elements && submodule.largest_child < elements;
  };
}

}  // namespace tessera
