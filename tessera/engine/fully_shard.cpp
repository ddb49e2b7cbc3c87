#include "tessera/engine/fully_shard.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/pattern.h"
#include "tessera/base/text.h"
#include "tessera/engine/arena_lease.h"
#include "tessera/engine/deferred.h"
#include "tessera/storage/memory.h"

namespace tessera {
namespace {

constexpr const char* kRoot = "(root)";

// The dotted names of modules that are units, the root's being "", with the name of the unit that each belongs to: its own,
// or the first of those that it is joined with.
std::map<std::string, std::string> unit_names(const torch::nn::Module& module, const ShardOptions& options) {
  std::map<std::string, std::string> names{{"", ""}};
  std::vector<std::string> first(options.joined.size());
  if (options.units)
    for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
      if (!options.units(item.key(), *item.value())) continue;
      auto& unit = names[item.key()] = item.key();
      for (size_t i = 0; i < first.size(); ++i) {
        if (!matches(options.joined[i], item.key())) continue;
        if (first[i].empty()) first[i] = item.key();
        unit = first[i];
        break;
      }
    }
  if (options.units && names.size() == 1)
    throw ConfigError(text("the unit policy matches no module of this model (", module.name(),
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

void check_parameter(const std::string& name, const at::Tensor& tensor, std::map<const void*, std::string>& storages) {
  if (tensor.key_set().has(c10::DispatchKey::Fake))
    throw ConfigError(text("parameter '", name, "' is sharded already; shard a model once"));
  if (!tensor.device().is_cpu())
    throw ConfigError(text("parameter '", name, "' is on ", tensor.device().str(),
                           ", but ranks that share memory compute on the CPU; move the model to the CPU"));
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_complex())
    throw ConfigError(text("parameter '", name, "' is ", tensor.is_complex() ? "complex" : "not dense",
                           "; only dense, real parameters can be sharded"));
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
  for (auto& unit : units) unit.kept_after_forward = !options.reshard_after_forward.release;
  for (const auto& pattern : options.kept) {
    bool found = false;
    for (auto& unit : units)
      if (matches(pattern, unit.name)) found = unit.kept_after_forward = true;
    if (!found)
      throw ConfigError(text("the pattern '", pattern, "' of units to keep after forward matches none of this model"));
  }
}

// Parameters by unit, in the order of the model; one unit a type and layout, since a unit is one buffer of one type. A tied
// parameter belongs to where it is met first.
std::vector<UnitSpec> collect(const torch::nn::Module& module, const ShardOptions& options) {
  const auto names = unit_names(module, options);
  std::vector<int> ignored(options.ignored.size(), 0);
  std::vector<UnitSpec> units;
  std::map<std::tuple<std::string, c10::ScalarType, std::string>, size_t> index_of;
  std::vector<int> counts(options.layouts.size(), 0);
  std::set<std::string> used;
  std::set<const at::TensorImpl*> seen;
  std::map<const void*, std::string> storages;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (is_ignored(item.key(), options.ignored, ignored)) continue;
    check_parameter(item.key(), tensor, storages);
    const std::string unit = unit_of(item.key(), names);
    const LayoutKind layout = layout_of(item.key(), options.layouts, counts);
    const auto [found, fresh] = index_of.emplace(std::tuple(unit, tensor.scalar_type(), name_of(layout)), units.size());
    if (fresh) {
      std::string name = unit.empty() ? kRoot : unit;
      if (!used.insert(name).second)
        used.insert(name += text(":", c10::toString(tensor.scalar_type()), ":", name_of(layout)));
      units.push_back({name, {}, layout});
    }
    units[found->second].parameters.push_back({item.key(), tensor});
  }
  if (units.empty()) throw ConfigError(text("the model (", module.name(), ") has no parameters to shard"));
  check_counts(options.layouts, counts);
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
      if (tensor.key_set().has(c10::DispatchKey::DeferredInit) || tensor.numel() == 0 || tensor.storage().use_count() < 2)
        continue;
      std::fprintf(stderr,
                   "tessera: another tensor shares the memory of parameter '%s'; it keeps the values of now, and gradients "
                   "through it are those of these values. If the model computes with it, make that view in forward "
                   "(said of the first)\n",
                   parameter.name.c_str());
      return;
    }
}

// What all ranks of this host will hold when the model is sharded, without optimizer state and transient gradients.
Bytes state_of_host(const std::vector<UnitSpec>& units, const ShardOptions& options, const Division& division) {
  int64_t bytes = 0;
  for (const auto& unit : units)
    for (const auto& parameter : unit.parameters) {
      const auto type = parameter.tensor.scalar_type();
      const auto element =
          static_cast<int64_t>(c10::elementSize(trainable_type(type) ? options.precision.working.value_or(type) : type));
      const int64_t copies = division.copies();
      const int64_t gradients = options.placements.gradient == Placement::sharded
                                    ? division.ranks() / division.optimizer_parts()
                                    : division.ranks();
      bytes += parameter.tensor.numel() * element * (copies + (parameter.tensor.requires_grad() ? gradients : 0));
    }
  return Bytes(bytes);
}

std::string words_for(const Mesh& mesh) {
  std::string axes;
  for (const auto& axis : mesh.axes()) axes += text(axes.empty() ? "" : " x ", axis.name, " ", axis.size);
  return axes;
}

std::string words_for(const ShardOptions& options, const Mesh& mesh, const std::vector<UnitSpec>& units) {
  const auto type = [](const std::optional<c10::ScalarType>& t) { return t ? c10::toString(*t) : "as is"; };
  std::string layouts, kept;
  for (const auto& unit : units) kept += unit.kept_after_forward ? " " + unit.name : "";
  for (const auto& choice : options.layouts) layouts += text(", layout of '", choice.pattern, "' ", name_of(choice.layout));
  return text("placement ", name_of(options.placements), " on the mesh ", words_for(mesh), layouts, ", working type ",
              type(options.precision.working), ", gradient type ", type(options.precision.gradient), ", type of buffers ",
              type(options.precision.buffers), ", type of outputs ", type(options.precision.output),
              options.precision.cast_inputs ? "" : ", inputs not cast",
              options.buffers == Buffers::average     ? ", buffers averaged"
              : options.buffers == Buffers::broadcast ? ", buffers broadcast"
                                                      : ", buffers local",
              ", gradients divided by ", options.gradient_divisor.value_or(0),
              options.initial == Initial::verify ? ", values verified" : ", values broadcast",
              options.non_finite == NonFinite::stop ? ", stop" : ", skip", ", loss scale ", name_of(options.loss_scale),
              kept.empty() ? "" : ", kept after forward:", kept);
}

std::vector<at::Tensor> ignored_of(const torch::nn::Module& module, const ShardOptions& options) {
  std::vector<at::Tensor> all;
  std::vector<int> counts(options.ignored.size());
  for (const auto& item : module.named_parameters())
    if (is_ignored(item.key(), options.ignored, counts)) all.push_back(item.value());
  return all;
}

std::unique_ptr<ModuleBuffers> buffers_of(const torch::nn::Module& module, const ShardOptions& options) {
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  for (const auto& item : module.named_buffers()) {
    at::Tensor buffer = item.value();
    if (const auto type = options.precision.buffers; type && buffer.defined() && buffer.is_floating_point())
      buffer.set_data(buffer.to(*type));
    buffers.emplace_back(item.key(), buffer);
  }
  return std::make_unique<ModuleBuffers>(std::move(buffers), options.buffers);
}

}  // namespace

namespace {

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

}  // namespace

UnitPolicy units_named(std::vector<std::string> patterns) {
  return [patterns = std::move(patterns)](const std::string& name, const torch::nn::Module&) {
    return std::any_of(patterns.begin(), patterns.end(), [&](const auto& pattern) { return matches(pattern, name); });
  };
}

UnitPolicy units_of_size(int64_t elements) {
  const auto large = [elements](const torch::nn::Module& module) {
    int64_t count = 0;
    for (const auto& parameter : module.parameters()) count += parameter.numel();
    return count >= elements;
  };
  return [large](const std::string&, const torch::nn::Module& module) {
    const auto children = module.children();
    return large(module) && std::none_of(children.begin(), children.end(), [&](const auto& child) { return large(*child); });
  };
}

Sharded fully_shard(torch::nn::Module& module, const Mesh& mesh, const ShardOptions& wanted) {
  ShardOptions options = wanted;
  options.placements = placements_of(wanted, mesh);
  check(options.placements);
  if (const auto divisor = options.gradient_divisor; divisor && !(*divisor > 0 && std::isfinite(*divisor)))
    throw ConfigError(text("gradient_divisor must be a positive number, but is ", *divisor));
  const Division division(options.placements, mesh);
  const LossScaler checked(options.loss_scale);
  const Deferred::Pause pause;
  settle_deferred(module);
  auto units = collect(module, options);
  const auto communicator = SharedMemory::connect(mesh.world());
  agree(*communicator, units, words_for(options, mesh, units), options.initial);
  if (communicator->rank().value == 0) say_that_others_stay_behind(units);
  require_memory(
      state_of_host(units, options, division),
      text("sharding ", units.size(), " units over ", communicator->size(), " ranks as ", name_of(options.placements)));
  materialize(module.buffers());
  materialize(ignored_of(module, options));
  auto arena = ArenaLease::take(communicator);
  const auto give_values = [&](UnitSpec& unit) {
    materialize(tensors_of(unit));
    if (options.initial == Initial::broadcast) broadcast_values(*communicator, unit);
  };
  auto engine = std::make_shared<Engine>(
      communicator,
      EngineSettings{options.placements, division, options.precision, options.non_finite,
                     options.gradient_divisor.value_or(communicator->size()), options.loss_scale, give_values},
      std::move(units));
  auto buffers = buffers_of(module, options);
  buffers->agree(*communicator, options.initial == Initial::verify);
  if (!buffers->empty()) engine->keep_equal(std::move(buffers));
  arena->arena().trim();
  return {std::move(engine), std::move(arena)};
}

Sharded::Sharded(std::shared_ptr<Engine> engine, std::shared_ptr<ArenaLease> arena)
    : arena_(std::move(arena)), engine_(std::move(engine)) {}

at::Tensor Sharded::scale(const at::Tensor& loss) const {
  if (!engine_->loss_scaler().in_use()) return loss;
  const double scale = engine_->loss_scaler().scale();
  at::Tensor scaled = (loss.element_size() < 4 ? loss.to(at::kFloat) : loss) * scale;
  if (scaled.requires_grad())
    scaled.register_hook([engine = std::weak_ptr(engine_), scale](const at::Tensor&) {
      if (const auto alive = engine.lock()) alive->on_scaled_loss(scale);
    });
  return scaled;
}

std::vector<at::Tensor> Sharded::parameters() const {
  std::vector<at::Tensor> shards;
  for (auto& [name, shard] : named_parameters()) shards.push_back(std::move(shard));
  return shards;
}

std::vector<std::pair<std::string, at::Tensor>> Sharded::named_parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> shards;
  for (const auto& unit : engine_->units())
    for (const auto& parameter : unit->parameters()) shards.emplace_back(parameter.name, parameter.shard);
  return shards;
}

std::vector<std::pair<std::string, at::Tensor>> Sharded::full_parameters() const {
  engine_->refuse_replaced();
  const at::NoGradGuard no_grad;
  std::vector<std::pair<std::string, at::Tensor>> whole;
  for (const auto& unit : engine_->units())
    for (const auto& parameter : unit->parameters()) whole.emplace_back(parameter.name, parameter.tensor.detach().clone());
  return whole;
}

std::vector<std::pair<std::string, at::Tensor>> Sharded::full_gradients() const {
  auto gradients = engine_->full_gradients();
  std::vector<std::pair<std::string, at::Tensor>> named;
  size_t index = 0;
  for (const auto& unit : engine_->units())
    for (const auto& parameter : unit->parameters()) named.emplace_back(parameter.name, std::move(gradients[index++]));
  return named;
}

void Sharded::load_parameters(const std::vector<std::pair<std::string, at::Tensor>>& values, bool strict) {
  std::map<std::string, at::Tensor> given(values.begin(), values.end());
  std::vector<Engine::NewValues> all;
  std::string faults;
  const auto& units = engine_->units();
  for (uint32_t u = 0; u < units.size(); ++u)
    for (ParameterIndex p = 0; p < units[u]->parameters().size(); ++p) {
      const std::string& name = units[u]->parameters()[p].name;
      const auto found = given.find(name);
      if (found == given.end()) {
        if (strict) faults += text("; '", name, "' is missing");
        continue;
      }
      if (found->second.sizes() != units[u]->shape(p))
        faults += text("; '", name, "' has the shape ", c10::str(found->second.sizes()), ", wanted ",
                       c10::str(c10::IntArrayRef(units[u]->shape(p))));
      all.push_back({u, p, found->second});
      given.erase(found);
    }
  for (const auto& [name, value] : given)
    if (strict) faults += text("; '", name, "' is no parameter of the sharded model");
  if (!faults.empty()) throw ConfigError("parameters can't be loaded: " + faults.substr(2));
  engine_->write(all);
}

StateBytes Sharded::state_bytes(int64_t optimizer_bytes_per_element) const {
  StateBytes bytes;
  const auto& units = engine_->units();
  for (uint32_t u = 0; u < units.size(); ++u) {
    const auto& unit = units[u];
    const auto add = [&](double& role, int64_t held, double real) {
      role += static_cast<double>(held) * real;
      bytes.padding += static_cast<double>(held) * (1 - real);
    };
    add(bytes.parameters, unit->parameter_bytes().value, unit->real_share_of_parameters());
    add(bytes.gradients, unit->gradient_bytes().value, unit->real_share_of_shard());
    const int64_t element =
        optimizer_bytes_per_element + (engine_->consumer() ? engine_->consumer()->bytes_per_element(u) : 0);
    const int64_t optimizer = unit->master_bytes().value + (unit->trainable() ? unit->updated_elements() * element : 0);
    add(bytes.optimizer, optimizer, unit->real_share_of_shard());
    bytes.communication_buffers += static_cast<double>(unit->staged_bytes().value);
  }
  const double lent = static_cast<double>(engine_->traffic().peak_lent.value);
  (engine_->placements().gradient == Placement::replicated ? bytes.gradients : bytes.communication_buffers) += lent;
  return bytes;
}

int64_t Sharded::parameter_count() const {
  int64_t count = 0;
  for (const auto& unit : engine_->units()) count += unit->layout().real().value;
  return count;
}

}  // namespace tessera
