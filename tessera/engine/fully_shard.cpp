#include "tessera/engine/fully_shard.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/arena_lease.h"
#include "tessera/engine/deferred.h"
#include "tessera/storage/memory.h"

namespace tessera {
namespace {

constexpr const char* kRoot = "(root)";

// The dotted names of modules that are units, the root's being "".
std::set<std::string> unit_names(const torch::nn::Module& module, const UnitPolicy& policy) {
  std::set<std::string> names{""};
  if (!policy) return names;
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    if (policy(item.key(), *item.value())) names.insert(item.key());
  if (names.size() == 1)
    throw ConfigError(text("the unit policy matches no module of this model (", module.name(),
                           "); leave units unset to gather the whole model at once"));
  return names;
}

// The innermost unit that the parameter `name` lies in.
std::string unit_of(const std::string& name, const std::set<std::string>& units) {
  for (size_t end = name.rfind('.'); end != std::string::npos; end = end == 0 ? std::string::npos : name.rfind('.', end - 1))
    if (units.contains(name.substr(0, end))) return name.substr(0, end);
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

// Parameters by unit, in the order of the model; one unit a type, since a unit is one buffer of one type. A tied parameter
// belongs to where it is met first.
std::vector<UnitSpec> collect(const torch::nn::Module& module, const UnitPolicy& policy) {
  const auto names = unit_names(module, policy);
  std::vector<UnitSpec> units;
  std::map<std::pair<std::string, c10::ScalarType>, size_t> index_of;
  std::set<std::string> used;
  std::set<const at::TensorImpl*> seen;
  std::map<const void*, std::string> storages;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    check_parameter(item.key(), tensor, storages);
    const std::string unit = unit_of(item.key(), names);
    const auto [found, fresh] = index_of.emplace(std::pair(unit, tensor.scalar_type()), units.size());
    if (fresh) {
      std::string name = unit.empty() ? kRoot : unit;
      if (!used.insert(name).second) name += text(":", c10::toString(tensor.scalar_type()));
      units.push_back({name, {}});
    }
    units[found->second].parameters.push_back({item.key(), tensor});
  }
  if (units.empty()) throw ConfigError(text("the model (", module.name(), ") has no parameters to shard"));
  return units;
}

// What all ranks of this host will hold when the model is sharded, without optimizer state and transient gradients.
Bytes state_of_host(const std::vector<UnitSpec>& units, const ShardOptions& options, int ranks) {
  int64_t bytes = 0;
  for (const auto& unit : units)
    for (const auto& parameter : unit.parameters) {
      const auto type = parameter.tensor.scalar_type();
      const auto element =
          static_cast<int64_t>(c10::elementSize(trainable_type(type) ? options.precision.working.value_or(type) : type));
      const int64_t copies = options.placements.parameter == Placement::sharded ? 1 : ranks;
      const int64_t gradients = options.placements.gradient == Placement::sharded ? 1 : ranks;
      bytes += parameter.tensor.numel() * element * (copies + (parameter.tensor.requires_grad() ? gradients : 0));
    }
  return Bytes(bytes);
}

// The placements say "sharded" without naming an axis, so there must be one only.
void check_axes(const Mesh& mesh, const Placements& placements) {
  std::string several;
  int count = 0;
  for (const auto& axis : mesh.axes())
    if (axis.size > 1) several += text(count++ > 0 ? ", '" : "'", axis.name, "' (", axis.size, ")");
  if (count > 1 && placements != ddp())
    throw ConfigError(text("placement ", name_of(placements), " shards over one axis, but the mesh has several: ", several,
                           "; give a mesh with one axis of more than one rank"));
}

std::string words_for(const ShardOptions& options) {
  const auto type = [](const std::optional<c10::ScalarType>& t) { return t ? c10::toString(*t) : "as is"; };
  return text("placement ", name_of(options.placements), ", working type ", type(options.precision.working),
              ", gradient type ", type(options.precision.gradient),
              options.initial == Initial::verify ? ", values verified" : ", values broadcast",
              options.non_finite == NonFinite::stop ? ", stop" : ", skip");
}

}  // namespace

Sharded fully_shard(torch::nn::Module& module, const Mesh& mesh, const ShardOptions& options) {
  check(options.placements);
  check_axes(mesh, options.placements);
  const Deferred::Pause pause;
  settle_deferred(module);
  auto units = collect(module, options.units);
  const auto communicator = SharedMemory::connect(mesh.world());
  agree(*communicator, units, words_for(options), options.initial);
  require_memory(
      state_of_host(units, options, communicator->size()),
      text("sharding ", units.size(), " units over ", communicator->size(), " ranks as ", name_of(options.placements)));
  materialize(module.buffers());
  auto arena = ArenaLease::take(communicator);
  const auto give_values = [&](UnitSpec& unit) {
    materialize(tensors_of(unit));
    if (options.initial == Initial::broadcast) broadcast_values(*communicator, unit);
  };
  auto engine = std::make_shared<Engine>(communicator, options.placements, options.precision, options.non_finite,
                                         std::move(units), give_values);
  arena->arena().trim();
  return {std::move(engine), std::move(arena)};
}

Sharded::Sharded(std::shared_ptr<Engine> engine, std::shared_ptr<ArenaLease> arena)
    : arena_(std::move(arena)), engine_(std::move(engine)) {}

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

StateBytes Sharded::state_bytes(int64_t optimizer_bytes_per_element) const {
  StateBytes bytes;
  for (const auto& unit : engine_->units()) {
    const auto& layout = unit->layout();
    // Padding is the unit's, so each rank's share of it is even, whoever's chunk holds it.
    const double rank_share = static_cast<double>(layout.padding().value) / static_cast<double>(layout.total().value);
    const auto add = [&](double& role, double held) {
      role += held * (1 - rank_share);
      bytes.padding += held * rank_share;
    };
    add(bytes.parameters, static_cast<double>(unit->parameter_bytes().value));
    add(bytes.gradients, static_cast<double>(unit->gradient_bytes().value));
    const int64_t optimizer =
        unit->master_bytes().value + (unit->trainable() ? unit->updated_elements() * optimizer_bytes_per_element : 0);
    add(bytes.optimizer, static_cast<double>(optimizer));
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
