#include <ATen/core/grad_mode.h>

#include <map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/arena_lease.h"
#include "tessera/engine/fully_shard.h"
#include "tessera/engine/parts.h"

namespace tessera {
namespace {

// An element, of tessera's own optimizer.
int64_t bytes_of_moments(const Engine& engine, uint32_t unit) {
  return engine.consumer() == nullptr ? 0 : engine.consumer()->bytes_per_element(unit);
}

}  // namespace

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
  std::map<std::string, at::Tensor> given;
  std::vector<Engine::NewValues> all;
  std::string faults;
  for (const auto& [name, value] : under_first_names(*engine_, values)) given.emplace(name, value);
  const auto& units = engine_->units();
  for (uint32_t u = 0; u < units.size(); ++u)
    for (ParameterIndex p = 0; p < units[u]->parameters().size(); ++p) {
      const std::string& name = units[u]->parameters()[p].name;
      const auto found = given.find(name);
      if (found == given.end()) {
        if (strict) faults += text("; '", name, "' is missing");
        continue;
      }
      if (found->second.is_complex() && !units[u]->complex())
        faults += text("; '", name, "' is complex, but the parameter is not");
      if (found->second.sizes() != units[u]->shape(p))
        faults += text("; '", name, "' has the shape ", c10::str(found->second.sizes()), ", wanted ",
                       c10::str(c10::IntArrayRef(units[u]->shape(p))));
      all.push_back({u, p, found->second});
      given.erase(found);
    }
  std::vector<std::pair<at::Tensor, at::Tensor>> ignored;  // and their new values
  for (const auto& [name, tensor] : engine_->ignored())
    if (const auto found = given.find(name); found != given.end()) {
      if (found->second.sizes() != tensor.sizes())
        faults +=
            text("; '", name, "' has the shape ", c10::str(found->second.sizes()), ", wanted ", c10::str(tensor.sizes()));
      ignored.emplace_back(tensor.detach(), found->second);
      given.erase(found);
    }
  for (const auto& [name, value] : given)
    if (strict) faults += text("; '", name, "' is no parameter of the sharded model");
  if (!faults.empty()) throw ConfigError("parameters can't be loaded: " + faults.substr(2));
  engine_->write(all);
  const at::NoGradGuard no_grad;
  for (auto& [parameter, value] : ignored) parameter.copy_(value);
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
    const int64_t moments = optimizer_bytes_per_element + bytes_of_moments(*engine_, u);
    add(bytes.optimizer, unit->optimizer_bytes(moments).value, unit->real_share_of_shard());
    bytes.communication_buffers += static_cast<double>(unit->staged_bytes().value);
  }
  const double lent = static_cast<double>(engine_->traffic().peak_lent.value);
  bool replicated = false;  // then gradients lie where autograd made them
  for (const auto& unit : engine_->units()) replicated |= !unit->gradients_sharded();
  (replicated ? bytes.gradients : bytes.communication_buffers) += lent;
  return bytes;
}

PeakBytes Sharded::predicted_peak(int64_t optimizer_bytes_per_element) const {
  std::vector<PeakBytes> peaks;
  const auto& units = engine_->units();
  for (uint32_t u = 0; u < units.size(); ++u)
    peaks.push_back(units[u]->peak_bytes(optimizer_bytes_per_element + bytes_of_moments(*engine_, u)));
  return tessera::predicted_peak(peaks);
}

int64_t Sharded::parameter_count() const {
  int64_t count = 0;
  for (const auto& unit : engine_->units()) count += unit->layout().real().value / (unit->complex() ? 2 : 1);
  return count;
}

}  // namespace tessera
