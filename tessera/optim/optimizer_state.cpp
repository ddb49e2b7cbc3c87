#include "tessera/optim/optimizer_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/packed.h"
#include "tessera/base/text.h"
#include "tessera/engine/parts.h"

namespace tessera {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

// ---- torch::optim ----------------------------------------------------------------------------------------------------

// Where one parameter's state lies in an object of torch's.
struct Slots {
  std::vector<std::pair<std::string, at::Tensor*>> tensors;
  int64_t* step = nullptr;
};

template <class State>
Slots slots_of_adam(State& s) {
  return {{{"exp_avg", &s.exp_avg()}, {"exp_avg_sq", &s.exp_avg_sq()}, {"max_exp_avg_sq", &s.max_exp_avg_sq()}}, &s.step()};
}
Slots slots_of(torch::optim::AdamParamState& s) { return slots_of_adam(s); }
Slots slots_of(torch::optim::AdamWParamState& s) { return slots_of_adam(s); }
Slots slots_of(torch::optim::SGDParamState& s) { return {{{"momentum_buffer", &s.momentum_buffer()}}, nullptr}; }
Slots slots_of(torch::optim::AdagradParamState& s) { return {{{"sum", &s.sum()}}, &s.step()}; }
Slots slots_of(torch::optim::RMSpropParamState& s) {
  return {{{"square_avg", &s.square_avg()}, {"momentum_buffer", &s.momentum_buffer()}, {"grad_avg", &s.grad_avg()}},
          &s.step()};
}

// How to make, and to look into, the state of one kind of optimizer.
struct Kind {
  std::function<std::unique_ptr<OptimizerParamState>()> make;
  std::function<Slots(OptimizerParamState&)> slots;
};

template <class State>
Kind kind() {
  return {[] { return std::make_unique<State>(); }, [](OptimizerParamState& s) { return slots_of(static_cast<State&>(s)); }};
}

Kind kind_of(const Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer)) return kind<torch::optim::AdamWParamState>();
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer)) return kind<torch::optim::AdamParamState>();
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) return kind<torch::optim::SGDParamState>();
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer)) return kind<torch::optim::RMSpropParamState>();
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer)) return kind<torch::optim::AdagradParamState>();
  throw ConfigError(
      "the state of this optimizer is not known here; known are tessera::AdamW and torch::optim's SGD, Adam, AdamW, RMSprop "
      "and Adagrad. For another, Sharded::full_of and local_of convert what it keeps for each of Sharded::parameters()");
}

bool has(const Optimizer& optimizer, const at::Tensor& parameter) {
  for (const auto& group : optimizer.param_groups())
    for (const auto& mine : group.params())
      if (mine.is_same(parameter)) return true;
  return false;
}

// ---- what is to be loaded ---------------------------------------------------------------------------------------------

struct Part {
  ParameterPlace place;
  ParameterState state;  // in the shape of the shard
};

std::vector<Part> parts_of(Engine& engine, const OptimizerState& state, bool whole) {
  std::vector<Part> parts;
  for (const auto& [name, given] : state) {
    Part part{find(engine, name), given};
    const auto& shard = parameter_at(engine, part.place).shard;
    for (auto& [key, tensor] : part.state.tensors) {
      if (whole) tensor = part_of(engine, part.place, tensor);
      if (!tensor.defined() || tensor.sizes() != shard.sizes())
        throw ConfigError(text("this rank's part of '", key, "' of parameter '", name, "' has the shape ",
                               c10::str(shard.sizes()), ", but what was given has ",
                               tensor.defined() ? c10::str(tensor.sizes()) : std::string("none"), " (rank ",
                               engine.communicator().rank().value, ")"));
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

[[noreturn]] void refuse_key(const std::string& key, const std::string& name, const char* how) {
  throw ConfigError(text("the state of parameter '", name, "' ", how, " '", key, "'"));
}

void check_engine(const Sharded& sharded, const AdamW& optimizer) {
  if (&sharded.engine() != &optimizer.engine())
    throw ConfigError("this AdamW was made for another sharded model; give the one that it was constructed with");
}

void load(const Sharded& sharded, AdamW& optimizer, const OptimizerState& state, bool whole) {
  check_engine(sharded, optimizer);
  const at::NoGradGuard no_grad;
  const auto parts = parts_of(sharded.engine(), state, whole);
  for (const auto& [place, given] : parts) {
    const auto& name = parameter_at(sharded.engine(), place).name;
    for (const auto& item : given.tensors)
      if (item.first != "exp_avg" && item.first != "exp_avg_sq")
        refuse_key(item.first, name, "has what tessera::AdamW doesn't keep:");
    for (const char* key : {"exp_avg", "exp_avg_sq"})
      if (!given.tensors.contains(key)) refuse_key(key, name, "lacks");
  }
  for (const auto& place : places_of(sharded.engine())) {
    auto moments = optimizer.moments(place.unit, place.parameter);
    moments.exp_avg.zero_();
    moments.exp_avg_sq.zero_();
    moments.updates = 0;
  }
  for (const auto& [place, given] : parts) {
    auto moments = optimizer.moments(place.unit, place.parameter);
    moments.exp_avg.copy_(given.tensors.at("exp_avg").reshape(-1));
    moments.exp_avg_sq.copy_(given.tensors.at("exp_avg_sq").reshape(-1));
    moments.updates = given.step;
  }
}

constexpr const char* kMomentum = "momentum_buffer";

void load(const Sharded& sharded, Muon& optimizer, const OptimizerState& state, bool whole) {
  const at::NoGradGuard no_grad;
  const auto& mine = optimizer.names();
  const auto parts = parts_of(sharded.engine(), state, whole);
  for (const auto& [place, given] : parts) {
    const auto& name = parameter_at(sharded.engine(), place).name;
    if (std::find(mine.begin(), mine.end(), name) == mine.end())
      throw ConfigError(text("parameter '", name, "' is not among Muon's matrices, so it can't be given state"));
    for (const auto& item : given.tensors)
      if (item.first != kMomentum) refuse_key(item.first, name, "has what Muon doesn't keep:");
    if (!given.tensors.contains(kMomentum)) refuse_key(kMomentum, name, "lacks");
  }
  for (const auto& name : mine)
    if (auto momentum = optimizer.momentum(name); momentum.defined()) momentum.zero_();
  for (const auto& [place, given] : parts)
    if (auto momentum = optimizer.momentum(parameter_at(sharded.engine(), place).name); momentum.defined())
      momentum.copy_(given.tensors.at(kMomentum));
}

void load(const Sharded& sharded, Optimizer& optimizer, const OptimizerState& state, bool whole) {
  const at::NoGradGuard no_grad;
  const Kind kind = kind_of(optimizer);
  std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> made;
  for (const auto& [place, given] : parts_of(sharded.engine(), state, whole)) {
    const auto& [name, shard] =
        std::tie(parameter_at(sharded.engine(), place).name, parameter_at(sharded.engine(), place).shard);
    if (!has(optimizer, shard))
      throw ConfigError(text("parameter '", name, "' is not among the optimizer's, so it can't be given state"));
    auto fresh = kind.make();
    const Slots slots = kind.slots(*fresh);
    if (slots.step != nullptr) *slots.step = given.step;
    for (const auto& [key, tensor] : given.tensors) {
      const auto slot =
          std::find_if(slots.tensors.begin(), slots.tensors.end(), [&](const auto& s) { return s.first == key; });
      if (slot == slots.tensors.end()) refuse_key(key, name, "has what this optimizer doesn't keep:");
      *slot->second = tensor.to(shard.scalar_type()).clone();
    }
    made.emplace_back(shard.unsafeGetTensorImpl(), std::move(fresh));
  }
  optimizer.state().clear();
  for (auto& [key, fresh] : made) optimizer.state()[key] = std::move(fresh);
}

// How often each parameter was updated. A rank without an element of it doesn't know.
std::vector<int64_t> updates_of(Engine& engine, AdamW& optimizer) {
  std::vector<int64_t> updates;
  for (const auto& place : places_of(engine)) updates.push_back(optimizer.moments(place.unit, place.parameter).updates);
  for (const auto& bytes : engine.communicator().all_gather("updates of AdamW", packed(updates))) {
    const auto theirs = unpacked_all<int64_t>(bytes);
    for (size_t i = 0; i < updates.size(); ++i) updates[i] = std::max(updates[i], theirs.at(i));
  }
  return updates;
}

}  // namespace

OptimizerState local_state(const Sharded& sharded, AdamW& optimizer) {
  check_engine(sharded, optimizer);
  sharded.engine().settle();
  OptimizerState state;
  for (const auto& place : places_of(sharded.engine())) {
    const auto& parameter = parameter_at(sharded.engine(), place);
    const auto moments = optimizer.moments(place.unit, place.parameter);
    if (moments.updates == 0) continue;
    const auto shaped = [&](const at::Tensor& flat) { return flat.view(parameter.shard.sizes()).clone(); };
    state[parameter.name] = {{{"exp_avg", shaped(moments.exp_avg)}, {"exp_avg_sq", shaped(moments.exp_avg_sq)}},
                             moments.updates};
  }
  return state;
}

OptimizerState local_state(const Sharded& sharded, Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  sharded.engine().settle();
  const Kind kind = kind_of(optimizer);
  OptimizerState state;
  for (const auto& place : places_of(sharded.engine())) {
    const auto& parameter = parameter_at(sharded.engine(), place);
    const auto found = optimizer.state().find(parameter.shard.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    const Slots slots = kind.slots(*found->second);
    auto& kept = state[parameter.name];
    if (slots.step != nullptr) kept.step = *slots.step;
    for (const auto& [key, tensor] : slots.tensors)
      if (tensor->defined()) kept.tensors[key] = tensor->detach().clone();
  }
  return state;
}

OptimizerState local_state(const Sharded& sharded, Muon& optimizer) {
  sharded.engine().settle();
  OptimizerState state;
  for (const auto& name : optimizer.names())
    if (const auto momentum = optimizer.momentum(name); momentum.defined())
      state[name].tensors[kMomentum] = momentum.clone();
  return state;
}

OptimizerState full_state(const Sharded& sharded, Muon& optimizer) {
  sharded.engine().settle();
  OptimizerState state;
  for (const auto& name : optimizer.names()) {
    const auto place = find(sharded.engine(), name);
    const auto& shard = parameter_at(sharded.engine(), place).shard;
    const auto momentum = optimizer.momentum(name);
    state[name].tensors[kMomentum] =
        whole_of(sharded.engine(), place, momentum.defined() ? momentum : at::empty(shard.sizes(), shard.scalar_type()));
  }
  return state;
}

OptimizerState full_state(const Sharded& sharded, AdamW& optimizer) {
  check_engine(sharded, optimizer);
  sharded.engine().settle();
  OptimizerState state;
  const auto updates = updates_of(sharded.engine(), optimizer);
  const auto places = places_of(sharded.engine());
  for (size_t i = 0; i < places.size(); ++i) {
    if (updates[i] == 0) continue;
    const auto moments = optimizer.moments(places[i].unit, places[i].parameter);
    state[parameter_at(sharded.engine(), places[i]).name] = {
        {{"exp_avg", whole_of(sharded.engine(), places[i], moments.exp_avg)},
         {"exp_avg_sq", whole_of(sharded.engine(), places[i], moments.exp_avg_sq)}},
        updates[i]};
  }
  return state;
}

OptimizerState full_state(const Sharded& sharded, Optimizer& optimizer) {
  OptimizerState state = local_state(sharded, optimizer);
  for (const auto& place : places_of(sharded.engine())) {  // in an order that is the same on all ranks
    const auto found = state.find(parameter_at(sharded.engine(), place).name);
    if (found == state.end()) continue;
    for (auto& [key, tensor] : found->second.tensors) tensor = whole_of(sharded.engine(), place, tensor);
  }
  return state;
}

void load_full_state(const Sharded& sharded, AdamW& optimizer, const OptimizerState& state) {
  load(sharded, optimizer, state, true);
}
void load_full_state(const Sharded& sharded, Muon& optimizer, const OptimizerState& state) {
  load(sharded, optimizer, state, true);
}
void load_full_state(const Sharded& sharded, Optimizer& optimizer, const OptimizerState& state) {
  load(sharded, optimizer, state, true);
}
void load_local_state(const Sharded& sharded, AdamW& optimizer, const OptimizerState& state) {
  load(sharded, optimizer, state, false);
}
void load_local_state(const Sharded& sharded, Muon& optimizer, const OptimizerState& state) {
  load(sharded, optimizer, state, false);
}
void load_local_state(const Sharded& sharded, Optimizer& optimizer, const OptimizerState& state) {
  load(sharded, optimizer, state, false);
}

}  // namespace tessera
