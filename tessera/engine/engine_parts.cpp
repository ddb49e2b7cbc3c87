// The part of Engine that reads and writes the ranks' parts of parameters and gradients.
#include <torch/csrc/autograd/engine.h>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/hash.h"
#include "tessera/engine/parts.h"

namespace tessera {

void Engine::refuse_in_backward(const std::string& what) const {
  if (phase_ == Phase::backward || torch::autograd::get_current_graph_task_id() != -1)
    throw GuardError(text(what, " came inside backward (step ", step_, "); call it when backward has returned"));
}

// All ranks must name the same, and none may be busy with what is about to be written.
void Engine::agree_on_parts(const std::string& label, const std::vector<NewValues>& all) {
  refuse_in_backward(label);
  std::vector<uint64_t> hashes;
  for (const auto& each : all) {
    const Unit& unit = *units_[each.unit];
    const auto& parameter = unit.parameters()[each.parameter];
    if (each.values.defined() && each.values.sizes() != parameter.shard.sizes())
      throw ConfigError(text(label, ": this rank's part of parameter '", parameter.name, "' has the shape ",
                             c10::str(parameter.shard.sizes()), ", but what was given has ", c10::str(each.values.sizes()),
                             " (rank ", communicator_->rank().value, ")"));
    const std::string what = text(parameter.name, each.values.defined() ? " given" : " none");
    hashes.push_back(hash_of_bytes(what.data(), static_cast<int64_t>(what.size())));
  }
  agree_on_values(label, hashes, all);
}

void Engine::write_parts(const std::vector<NewValues>& all) {
  settle();
  refuse_in_scope("new values of parameters' parts");
  release_all();
  refuse_replaced();
  agree_on_parts("new values of parameters' parts", all);  // from here on nobody reads
  write_each(all, &Unit::write_shard);
}

void Engine::refuse_new_values(const char* what) const {
  refuse_in_backward(what);
  refuse_in_scope(what);
  refuse_replaced();
}

void Engine::write_in_pieces(const std::vector<ParameterPlace>& places, const std::function<void()>& write) {
  release_all();
  communicator_->barrier("new values of parameters in pieces");  // from here on nobody reads
  try {
    write();
  } catch (...) {
    publish_written(places);
    throw;
  }
  publish_written(places);
}

void Engine::show_gradients() {
  if (consumer_ != nullptr && consumer_->fuses_reduction())
    throw ConfigError(
        "gradients are not kept when the optimizer takes them as they are reduced; construct it without fused_reduction");
  settle();
  make_reduced();
}

void Engine::write_gradient_parts(const std::vector<NewValues>& all) {
  show_gradients();
  for (const auto& each : all) {
    const auto& parameter = units_[each.unit]->parameters()[each.parameter];
    if (!parameter.tensor.requires_grad())
      throw ConfigError(text("parameter '", parameter.name, "' requires no gradient, so it can't be given one"));
  }
  agree_on_parts("new gradients", all);
  for (const auto& each : all) units_[each.unit]->write_gradient(each.parameter, each.values);
}

void Engine::write_gradients(const std::vector<NewValues>& all) {
  std::vector<NewValues> parts;
  std::vector<uint64_t> hashes;
  for (const auto& [unit, parameter, values] : all) {
    hashes.push_back(values.defined() ? hash_of_values(values) : 0);
    parts.push_back({unit, parameter, values.defined() ? part_of(*this, {unit, parameter}, values) : values});
  }
  agree_on_values("new gradients", hashes, all);
  write_gradient_parts(parts);
}

}  // namespace tessera
