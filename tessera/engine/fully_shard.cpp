#include "tessera/engine/fully_shard.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <map>
#include <set>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/pattern.h"
#include "tessera/base/text.h"
#include "tessera/engine/arena_lease.h"
#include "tessera/engine/deferred.h"
#include "tessera/engine/shard_model.h"
#include "tessera/storage/memory.h"

namespace tessera {
namespace {

constexpr const char* kRoot = "(root)";
constexpr const char* kResident = "(resident)";

// The dotted names of modules that are units, the root's being "", with the name of the unit that each belongs to: its own,
// or the first of those that it is joined with.
std::map<std::string, std::string> unit_names(const ModuleTree& model, const ShardOptions& options) {
  std::map<std::string, std::string> names{{"", ""}};
  std::vector<std::string> first(options.joined.size());
  if (options.units)
    for (const auto& submodule : model.submodules) {
      if (!options.units(submodule)) continue;
      auto& unit = names[submodule.name] = submodule.name;
      for (size_t i = 0; i < first.size(); ++i) {
        if (!matches(options.joined[i], submodule.name)) continue;
        if (first[i].empty()) first[i] = submodule.name;
        unit = first[i];
        break;
      }
    }
  if (options.units && names.size() == 1)
    throw ConfigError(text("the unit policy matches no module of this model (", model.type,
                           "); leave units unset to gather the whole model at once"));
  for (size_t i = 0; i < first.size(); ++i)
    if (first[i].empty())
      throw ConfigError(text("the pattern '", options.joined[i], "' of units to join matches no unit of this model"));
  return names;
}

// The innermost unit that the parameter `name` lies in.
std::string unit_of(const std::string& name, const std::map<std::string, std::string>& units) {
  for (size_t end = name.rfind('.'); end != std::string::npos; end = end == 0 ? std::string::npos : name.rfind('.', end - 1))
    if (const auto found = units.find(name.substr(0, end)); found != units.end()) return found->second;
  return "";
}

void check_parameter(const std::string& name, const at::Tensor& tensor, const std::string& unit,
                     std::map<const void*, std::string>& storages) {
  if (tensor.key_set().has(c10::DispatchKey::Fake))
    throw ConfigError(text("parameter '", name, "' (unit '", unit,
                           "') is sharded already; shard a model once and keep the Sharded that fully_shard returned, or "
                           "build the module anew"));
  if (tensor.is_inference())
    throw ConfigError(text("parameter '", name, "' (unit '", unit,
                           "') was made under InferenceMode and can't be trained; build the module outside of it"));
  if (!tensor.device().is_cpu())
    throw ConfigError(text("parameter '", name, "' is on ", tensor.device().str(),
                           ", but ranks that share memory compute on the CPU; move the model to the CPU"));
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.scalar_type() == at::kComplexHalf)
    throw ConfigError(text("parameter '", name, "' is ", tensor.is_complex() ? "of type ComplexHalf" : "not dense",
                           "; only dense parameters of real types, ComplexFloat and ComplexDouble can be sharded"));
  const auto [found, fresh] = storages.emplace(tensor.storage().unsafeGetStorageImpl(), name);
  if (!fresh && tensor.numel() > 0)
    throw ConfigError(
        text("parameters '", found->second, "' and '", name,
             "' are different tensors in the same memory; tie weights by assigning the same tensor to both modules"));
}

// The layout of the first pattern that matches; counts the matches.
LayoutKind layout_of(const std::string& name, const std::vector<LayoutChoice>& layouts, std::vector<int>& counts) {
  for (size_t i = 0; i < layouts.size(); ++i)
    if (matches(layouts[i].pattern, name)) {
      ++counts[i];
      return layouts[i].layout;
    }
  return flat();
}

void check_counts(const std::vector<LayoutChoice>& layouts, const std::vector<int>& counts) {
  for (size_t i = 0; i < layouts.size(); ++i)
    if (counts[i] == 0)
      throw ConfigError(text("the pattern '", layouts[i].pattern, "' (layout ", name_of(layouts[i].layout),
                             ") is the first to match no parameter of this model; patterns are tried in order"));
}

bool is_ignored(const std::string& name, const std::vector<std::string>& patterns, std::vector<int>& counts) {
  bool found = false;
  for (size_t i = 0; i < patterns.size(); ++i)
    if (matches(patterns[i], name)) {
      ++counts[i];
      found = true;
    }
  return found;
}

void keep_after_forward(std::vector<UnitSpec>& units, const ShardOptions& options) {
  for (auto& unit : units) unit.kept_after_forward = unit.rule.resident || !options.reshard_after_forward.release;
  for (const auto& pattern : options.kept) {
    bool found = false;
    for (auto& unit : units)
      if (unit.is_meant_by(pattern)) found = unit.kept_after_forward = true;
    if (found) continue;
    std::string names;
    for (const auto& unit : units) names += text(names.empty() ? "" : ", ", unit.name);
    throw ConfigError(text("the pattern '", pattern,
                           "' of units to keep after forward matches none of this model, whose units are ", names));
  }
}

// Parameters by unit, in the order of the model; one unit a type and rule, since a unit is one buffer of one type. A tied
// parameter belongs to where it is met first.
std::vector<UnitSpec> collect(const ModuleTree& model, const ShardOptions& options, const Rules& rules) {
  const auto names = unit_names(model, options);
  std::vector<int> ignored(options.ignored.size(), 0);
  std::vector<UnitSpec> units;
  std::map<std::tuple<std::string, c10::ScalarType, std::string>, size_t> index_of;
  std::set<std::string> used;
  std::set<const at::TensorImpl*> seen;
  std::map<const void*, std::string> storages;
  for (const auto& [name, tensor] : model.parameters) {
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (is_ignored(name, options.ignored, ignored)) continue;
    const std::string module = unit_of(name, names), asked_for = module.empty() ? kRoot : module;
    check_parameter(name, tensor, asked_for, storages);
    const Rule rule = rules.of(name, tensor);
    const std::string unit = rule.resident ? kResident : asked_for;
    const std::string kind = rules.name(rule);
    const auto [found, fresh] = index_of.emplace(std::tuple(unit, tensor.scalar_type(), kind), units.size());
    if (fresh) {
      std::string unit_name = unit;
      if (!used.insert(unit_name).second)
        used.insert(unit_name += text(":", c10::toString(tensor.scalar_type()), ":", kind));
      units.push_back({unit_name, {}, rule});
    }
    UnitSpec& spec = units[found->second];
    spec.parameters.push_back({name, tensor});
    if (std::find(spec.asked_for.begin(), spec.asked_for.end(), asked_for) == spec.asked_for.end())
      spec.asked_for.push_back(asked_for);
  }
  if (units.empty())
    throw ConfigError(text("the model (", model.type, ") has no parameters to shard",
                           model.script ? "; those of a frozen TorchScript module have become constants: shard the module "
                                          "as it was before it was frozen"
                           : seen.empty()
                               ? "; register its weights (register_parameter, register_module) before it is sharded"
                               : ": all of them are ignored; ignore fewer"));
  rules.check_used();
  keep_after_forward(units, options);
  for (size_t i = 0; i < ignored.size(); ++i)
    if (ignored[i] == 0)
      throw ConfigError(text("the pattern '", options.ignored[i], "' of parameters to ignore matches none of this model"));
  return units;
}

// A view of a parameter that was made before, such as `tied = weight.t()` in a constructor, keeps the old memory.
void say_that_others_stay_behind(const std::vector<UnitSpec>& units) {
  for (const auto& unit : units)
    for (const auto& parameter : unit.parameters) {
      const at::Tensor& tensor = parameter.tensor;
      if (tensor.key_set().has(c10::DispatchKey::DeferredInit) || tensor.numel() == 0) continue;
      const size_t own = tensor.is_view() ? 2 : 1;  // what a view was made from lives on in it
      if (tensor.storage().use_count() <= own) continue;
      std::fprintf(stderr,
                   "tessera: another tensor shares the memory of parameter '%s'; it keeps the values of now, and gradients "
                   "through it are those of these values. If the model computes with it, make that view in forward "
                   "(said of the first)\n",
                   parameter.name.c_str());
      return;
    }
}

// What all ranks of this host will hold when the model is sharded, without optimizer state and transient gradients.
Bytes state_of_host(const std::vector<UnitSpec>& units, const ShardOptions& options) {
  int64_t bytes = 0;
  for (const auto& unit : units) {
    const Division& division = unit.rule.division;
    for (const auto& parameter : unit.parameters) {
      const auto type = parameter.tensor.scalar_type();
      const auto element =
          static_cast<int64_t>(c10::elementSize(trainable_type(type) ? options.precision.working.value_or(type) : type));
      const int64_t copies = division.copies();
      const int64_t gradients = unit.rule.placements.gradient == Placement::sharded
                                    ? division.ranks() / division.optimizer_parts()
                                    : division.ranks();
      bytes += parameter.tensor.numel() * element * (copies + (parameter.tensor.requires_grad() ? gradients : 0));
    }
  }
  return Bytes(bytes);
}

std::string words_for(const Mesh& mesh) {
  std::string axes;
  for (const auto& axis : mesh.axes()) axes += text(axes.empty() ? "" : " x ", axis.name, " ", axis.size);
  return axes;
}

std::string words_for(const ShardOptions& options, const Mesh& mesh, const Rules& rules,
                      const std::vector<UnitSpec>& units) {
  const auto type = [](const std::optional<c10::ScalarType>& t) { return t ? c10::toString(*t) : "as is"; };
  std::string kept;
  for (const auto& unit : units) kept += unit.kept_after_forward ? " " + unit.name : "";
  return text(rules.words, " on the mesh ", words_for(mesh), ", working type ", type(options.precision.working),
              ", gradient type ", type(options.precision.gradient), ", type of buffers ", type(options.precision.buffers),
              ", type of outputs ", type(options.precision.output), options.precision.cast_inputs ? "" : ", inputs not cast",
              options.buffers == Buffers::average     ? ", buffers averaged"
              : options.buffers == Buffers::broadcast ? ", buffers broadcast"
                                                      : ", buffers local",
              ", gradients divided by ", options.gradient_divisor ? text(*options.gradient_divisor) : "the number of ranks",
              options.initial == Initial::verify ? ", values verified" : ", values broadcast",
              options.non_finite == NonFinite::stop ? ", stop" : ", skip", ", loss scale ", name_of(options.loss_scale),
              kept.empty() ? "" : ", kept after forward:", kept);
}

OtherNames other_names_of(const ModuleTree& model) {
  OtherNames names;
  std::map<const at::TensorImpl*, std::string> first;
  for (const auto& [name, tensor] : model.parameters)
    if (const auto [found, fresh] = first.emplace(tensor.unsafeGetTensorImpl(), name); !fresh && tensor.defined())
      names[found->second].push_back(name);
  return names;
}

std::vector<NamedParameter> ignored_of(const ModuleTree& model, const ShardOptions& options) {
  std::vector<NamedParameter> all;
  std::vector<int> counts(options.ignored.size());
  std::set<const at::TensorImpl*> seen;
  for (const auto& parameter : model.parameters)
    if (parameter.tensor.defined() && seen.insert(parameter.tensor.unsafeGetTensorImpl()).second &&
        is_ignored(parameter.name, options.ignored, counts))
      all.push_back(parameter);
  return all;
}

std::unique_ptr<ModuleBuffers> buffers_of(const ModuleTree& model, const ShardOptions& options) {
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  for (auto [name, buffer] : model.buffers) {
    if (const auto type = options.precision.buffers; type && buffer.defined() && buffer.is_floating_point())
      buffer.set_data(buffer.to(*type));
    buffers.emplace_back(name, buffer);
  }
  return std::make_unique<ModuleBuffers>(std::move(buffers), options.buffers);
}

void check_precision(const Precision& precision) {
  const auto require = [](const char* what, const std::optional<c10::ScalarType>& type, bool good, const char* wanted) {
    if (type && !good) throw ConfigError(text("precision.", what, " is ", c10::toString(*type), ", but must be ", wanted));
  };
  const auto computes = [](const std::optional<c10::ScalarType>& type) { return type && trainable_type(*type); };
  const auto floats = [](const std::optional<c10::ScalarType>& type) { return type && c10::isFloatingType(*type); };
  require("working", precision.working, computes(precision.working), "Float, Double, BFloat16 or Half");
  require("gradient", precision.gradient, computes(precision.gradient), "Float, Double, BFloat16 or Half");
  require("output", precision.output, floats(precision.output), "a floating type");
  require("buffers", precision.buffers, floats(precision.buffers), "a floating type");
}

// A secondary partition is full sharding with a copy of the parameters in each group, and everything else divided over all.
Placements placements_of(const ShardOptions& options, const Mesh& mesh) {
  const std::string& axis = options.reshard_after_forward.axis;
  if (axis.empty()) return options.placements;
  std::vector<std::string> others;
  bool found = false;
  for (const auto& each : mesh.axes()) {
    if (each.name == axis)
      found = true;
    else
      others.push_back(each.name);
  }
  if (options.placements != zero3() || !found || others.size() != 1)
    throw ConfigError(text("reshard_after_forward = '", axis,
                           "' needs the placement zero3 and a mesh of two axes, of which '", axis, "' is one; this is ",
                           name_of(options.placements), " on the mesh ", words_for(mesh)));
  return hybrid(axis, others[0], /*optimizer_over_both=*/true);
}

// What ShardOptions say.
Rules rules_of(const ShardOptions& options, const Mesh& mesh) {
  const Placements placements = placements_of(options, mesh);
  check(placements);
  const auto counts = std::make_shared<std::vector<int>>(options.layouts.size(), 0);
  std::string words = text("placement ", name_of(placements));
  for (const auto& choice : options.layouts) words += text(", layout of '", choice.pattern, "' ", name_of(choice.layout));
  if (options.resident_below < 0)
    throw ConfigError(text("resident_below must be 0 or more elements, but is ", options.resident_below));
  Placements whole = placements;
  whole.parameter = Placement::replicated;
  const Division division(placements, mesh), division_of_whole(whole, mesh);
  return {.of =
              [=](const std::string& name, const at::Tensor& parameter) {
                const LayoutKind layout = layout_of(name, options.layouts, *counts);
                const bool resident =
                    placements.parameter == Placement::sharded && parameter.numel() < options.resident_below;
                return resident ? Rule{whole, division_of_whole, layout, true} : Rule{placements, division, layout};
              },
          .name = [](const Rule& rule) { return name_of(rule.layout); },
          .check_used = [=] { check_counts(options.layouts, *counts); },
          .words = words};
}

void check(const ShardOptions& options) {
  if (const auto divisor = options.gradient_divisor; divisor && !(*divisor > 0 && std::isfinite(*divisor)))
    throw ConfigError(text("gradient_divisor must be a positive number, but is ", *divisor));
  const LossScaler checked(options.loss_scale);
  check_precision(options.precision);
}

// What one rank finds wrong with its model or options ends it on all ranks, instead of leaving the others to wait.
void refuse_on_all_ranks(Communicator& communicator, const std::function<void()>& prepare) {
  std::exception_ptr mine;
  std::string fault;
  try {
    prepare();
  } catch (const std::exception& error) {
    mine = std::current_exception();
    fault = error.what();
  }
  const auto faults = communicator.all_gather("what ranks find wrong with the model", fault);
  if (mine) std::rethrow_exception(mine);
  for (size_t r = 0; r < faults.size(); ++r)
    if (!faults[r].empty()) throw AgreementError(text("rank ", r, " can't shard its model: ", faults[r]));
}

}  // namespace

Sharded shard_model(const ModuleTree& model, const Mesh& mesh, const ShardOptions& options,
                    const std::function<Rules()>& make_rules) {
  const c10::InferenceMode no_inference(false);
  const auto communicator = SharedMemory::connect(mesh.world());
  Rules rules;
  std::vector<UnitSpec> units;
  refuse_on_all_ranks(*communicator, [&] {
    check(options);
    rules = make_rules();
    units = collect(model, options, rules);
  });
  agree(*communicator, units, words_for(options, mesh, rules, units), options.initial);
  if (communicator->rank().value == 0) say_that_others_stay_behind(units);
  require_memory(state_of_host(units, options),
                 text("sharding ", units.size(), " units over ", communicator->size(), " ranks as ", rules.words));
  materialize(tensors_of(model.buffers));
  auto buffers = buffers_of(model, options);
  buffers->agree(*communicator, options.initial == Initial::broadcast);
  auto ignored = ignored_of(model, options);
  materialize(tensors_of(ignored));
  auto arena = ArenaLease::take(communicator);
  const auto give_values = [&](UnitSpec& unit) {
    materialize(tensors_of(unit.parameters));
    if (options.initial == Initial::broadcast) broadcast_values(*communicator, unit);
  };
  auto engine = std::make_shared<Engine>(
      communicator,
      EngineSettings{options.precision, options.non_finite, options.gradient_divisor.value_or(communicator->size()),
                     options.loss_scale, give_values, std::move(ignored), other_names_of(model), model.now},
      std::move(units));
  if (!buffers->empty()) engine->keep_equal(std::move(buffers));
  arena->arena().trim();
  return {std::move(engine), std::move(arena)};
}

Sharded fully_shard(torch::nn::Module& module, const Mesh& mesh, const ShardOptions& options) {
  const Deferred::Pause pause;
  settle_deferred(module);
  return shard_model(tree_of(module), mesh, options, [&] { return rules_of(options, mesh); });
}

ModuleTree script_tree_of(const torch::jit::Module& module) {
  ModuleTree model = tree_of(module);
  if (torch::jit::canFuseOnCPU() && torch::jit::tensorExprFuserEnabled())
    throw ConfigError(text("the TorchScript model (", model.type,
                           ") would be compiled to kernels that read parameters' memory without the dispatcher, which could "
                           "not gather them; call torch::jit::overrideCanFuseOnCPU(false) before fully_shard"));
  return model;
}

Sharded fully_shard(torch::jit::Module& module, const Mesh& mesh, const ShardOptions& options) {
  const Deferred::Pause pause;
  return shard_model(script_tree_of(module), mesh, options, [&] { return rules_of(options, mesh); });
}

}  // namespace tessera
