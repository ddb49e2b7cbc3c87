// The part of Engine that reads and writes whole parameters and gradients.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/packed.h"
#include "tessera/base/text.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/hash.h"
#include "tessera/engine/parts.h"

namespace tessera {
void Engine::agree_on_values(const std::string& label, const std::vector<uint64_t>& hashes,
                             const std::function<std::string(size_t)>& name) {
  const auto everyones = communicator_->all_gather(label, packed(hashes));
  const auto first = unpacked_all<uint64_t>(everyones[0]);
  for (int r = 1; r < communicator_->size(); ++r) {
    const auto theirs = unpacked_all<uint64_t>(everyones[static_cast<size_t>(r)]);
    for (size_t i = 0; i < std::max(first.size(), theirs.size()); ++i)
      if (i >= first.size() || i >= theirs.size() || first[i] != theirs[i])
        throw AgreementError(text(label, ": the values of parameter '", i < hashes.size() ? name(i) : "?",
                                  "' differ between ranks 0 and ", r,
                                  "; all ranks must write the same (use one seed, or load the same file)"));
  }
}

void Engine::agree_on_values(const std::string& label, const std::vector<uint64_t>& hashes,
                             const std::vector<NewValues>& of) {
  agree_on_values(label, hashes, [&](size_t i) { return units_[of[i].unit]->parameters()[of[i].parameter].name; });
}

void Engine::refuse_replaced() const {
  for (const auto& unit : units_)
    for (ParameterIndex p = 0; p < unit->parameters().size(); ++p)
      if (unit->replaced(p))
        throw GuardError(text(
            "parameter '", unit->parameters()[p].name, "' of unit '", unit->name(),
            "' was given other memory, or another shape or strides, after sharding (set_data, torch::load, Module::to and "
            "t_ do that), which would never be trained. Call Sharded::adopt() on all ranks to take over the values, or copy "
            "into the parameter instead"));
}

// Of a module that was exchanged for another (replace_module) nothing here would know. Walking over a model costs as much as
// a small operator for each parameter, so it is done now and then.
void Engine::refuse_other_tensors() {
  if (!parameters_now_ || (step_ > 4 && step_ % 4 != 0)) return;
  const auto now = parameters_now_();
  std::map<std::string_view, const at::TensorImpl*> there;
  for (const auto& [name, tensor] : now) there.emplace(name, tensor.unsafeGetTensorImpl());
  std::set<const at::TensorImpl*> known;
  for (const auto& parameter : ignored_) {  // whatever has taken its place is ignored too
    known.insert(parameter.tensor.unsafeGetTensorImpl());
    if (const auto found = there.find(parameter.name); found != there.end()) known.insert(found->second);
  }
  for (const auto& unit : units_)
    for (const auto& parameter : unit->parameters()) {
      known.insert(parameter.tensor.unsafeGetTensorImpl());
      const auto check = [&](const std::string& name) {
        const auto found = there.find(name);
        if (found != there.end() && found->second != parameter.tensor.unsafeGetTensorImpl())
          throw GuardError(text("parameter '", name,
                                "' of the model is another tensor now than the one that was sharded in unit '", unit->name(),
                                "' (replace_module does that), which would never be trained. Copy values into the "
                                "parameter instead, or shard the model anew"));
      };
      check(parameter.name);
      if (const auto others = other_names_.find(parameter.name); others != other_names_.end())
        for (const auto& name : others->second) check(name);
    }
  for (const auto& [name, tensor] : now)
    if (tensor.requires_grad() && !known.contains(tensor.unsafeGetTensorImpl()) && !std::exchange(said_added_, true))
      std::fprintf(stderr,
                   "tessera: rank %d, step %lld: parameter '%s' was added to the model after it was sharded: it is in no "
                   "unit, and its gradients are not reduced over ranks (said once)\n",
                   communicator_->rank().value, static_cast<long long>(step_), name.c_str());
}

void Engine::write(const std::vector<NewValues>& all) {
  const c10::InferenceMode no_inference(false);
  settle();
  refuse_in_backward("new values of parameters");
  refuse_in_scope("new values of parameters");
  release_all();
  std::vector<uint64_t> hashes;
  for (const auto& each : all) hashes.push_back(hash_of_values(each.values));
  agree_on_values("new values of parameters", hashes, all);  // from here on nobody reads
  write_each(all, &Unit::write_values);
}

void Engine::write_each(const std::vector<NewValues>& all, void (Unit::*write)(ParameterIndex, const at::Tensor&)) {
  std::vector<ParameterPlace> places;
  for (const auto& [u, p, values] : all) {
    ((*units_[u]).*write)(p, values);
    places.push_back({u, p});
  }
  publish_written(places);
}

void Engine::publish_written(const std::vector<ParameterPlace>& places) {
  std::vector<bool> written(units_.size(), false);
  for (const auto& [u, p] : places) {
    // Autograd must know: what was saved for a backward holds other values now.
    units_[u]->parameters()[p].tensor.unsafeGetTensorImpl()->bump_version();
    written[u] = true;
  }
  for (size_t u = 0; u < units_.size(); ++u)
    if (written[u]) units_[u]->publish_next_epoch();
}

void Engine::adopt() {
  const c10::InferenceMode no_inference(false);
  std::vector<NewValues> all;
  for (uint32_t u = 0; u < units_.size(); ++u) {
    Unit& unit = *units_[u];
    for (ParameterIndex p = 0; p < unit.parameters().size(); ++p) {
      if (!unit.replaced(p)) continue;
      const auto& parameter = unit.parameters()[p];
      const at::Tensor values = parameter.tensor.detach();
      if (values.sizes() != unit.shape(p) || values.scalar_type() != unit.module_type())
        throw ConfigError(text("parameter '", parameter.name, "' was replaced by ", c10::toString(values.scalar_type()), " ",
                               c10::str(values.sizes()), ", but is ", c10::toString(unit.module_type()), " ",
                               c10::str(c10::IntArrayRef(unit.shape(p))),
                               "; shard the model anew for other shapes or types (precision.working chooses the type)"));
      all.push_back({u, p, values.alias()});
    }
  }
  for (const auto& each : all) units_[each.unit]->take_back_tensor(each.parameter);
  write(all);
}

// What optimizers use, with what was done to it. A gradient may have been dropped on some ranks alone.
std::vector<at::Tensor> Engine::gradients_of_shards() {
  const auto places = places_of(*this);
  std::string mine;
  for (const auto& place : places) mine += units_[place.unit]->shown_gradient(place.parameter).defined() ? '1' : '0';
  const auto everyones = communicator_->all_gather("parameters with a gradient", mine);
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < places.size(); ++i) {
    const Unit& unit = *units_[places[i].unit];
    const auto there = [i](const std::string& theirs) { return theirs.at(i) == '1'; };
    if (std::none_of(everyones.begin(), everyones.end(), there)) {
      gradients.emplace_back();
      continue;
    }
    const at::Tensor shown = unit.shown_gradient(places[i].parameter);
    at::Tensor whole = whole_of(
        *this, places[i], shown.defined() ? shown : at::zeros_like(unit.parameters()[places[i].parameter].shard.detach()));
    const auto type = precision_.gradient.value_or(unit.working_type());
    // Unscaled, fp16 might not hold it.
    if (!whole.is_complex() && !(type == c10::ScalarType::Half && scaler_.in_use())) whole = whole.to(type);
    gradients.push_back(std::move(whole));
  }
  return gradients;
}

std::vector<at::Tensor> Engine::full_gradients() {
  refuse_in_backward("a look at all gradients");
  if (consumer_ != nullptr && consumer_->fuses_reduction() &&
      any_unit([](const Unit& unit) { return unit.gradients_sharded(); }))
    throw ConfigError(
        "gradients are not kept when the optimizer takes them as they are reduced; construct it without fused_reduction");
  settle();
  make_reduced();
  call_gradient_hooks();
  return gradients_of_shards();
}

}  // namespace tessera
