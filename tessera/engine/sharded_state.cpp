// The part of Sharded that reads and writes state by name.
#include <ATen/core/grad_mode.h>

#include <map>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/fully_shard.h"
#include "tessera/engine/parts.h"

namespace tessera {
namespace {

using Named = NamedTensors;

std::vector<Engine::NewValues> placed(const Engine& engine, const Named& values) {
  std::vector<Engine::NewValues> all;
  for (const auto& [name, value] : under_first_names(engine, values)) {
    const auto [unit, parameter] = find(engine, name);
    all.push_back({unit, parameter, value});
  }
  return all;
}

// All parameters, ignored ones too.
std::map<std::string, std::vector<int64_t>> shapes_of(const Engine& engine) {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const auto& place : places_of(engine))
    shapes[parameter_at(engine, place).name] = engine.units()[place.unit]->shape(place.parameter);
  for (const auto& [name, tensor] : engine.ignored()) shapes[name] = tensor.sizes().vec();
  return shapes;
}

// A copy's differences to the model that it is to be a copy of.
std::string differences(const Engine& from, const Engine& to) {
  std::string faults;
  auto wanted = shapes_of(from);
  for (const auto& [name, shape] : shapes_of(to)) {
    const auto found = wanted.find(name);
    if (found == wanted.end()) {
      faults += text("; '", name, "' is only in the copy");
    } else if (found->second != shape) {
      faults += text("; '", name, "' has the shape ", words_of_shape(shape), ", wanted ", words_of_shape(found->second));
    }
    wanted.erase(name);
  }
  for (const auto& [name, shape] : wanted) faults += text("; '", name, "' is missing in the copy");
  return faults;
}

std::map<std::string, at::Tensor> buffers_of(const Engine& engine) {
  if (engine.buffers() == nullptr) return {};
  return {engine.buffers()->named().begin(), engine.buffers()->named().end()};
}

std::string differences(const std::map<std::string, at::Tensor>& from, const std::map<std::string, at::Tensor>& to) {
  std::string faults;
  for (const auto& [name, buffer] : from) {
    const auto found = to.find(name);
    if (found == to.end())
      faults += text("; the buffer '", name, "' is missing in the copy");
    else if (buffer.defined() != found->second.defined() || (buffer.defined() && buffer.sizes() != found->second.sizes()))
      faults += text("; the buffer '", name, "' has another shape in the copy");
  }
  for (const auto& item : to)
    if (!from.contains(item.first)) faults += text("; the buffer '", item.first, "' is only in the copy");
  return faults;
}

}  // namespace

at::Tensor Sharded::full_of(const std::string& name, const at::Tensor& part) const {
  return whole_of(*engine_, find(*engine_, name), part);
}

at::Tensor Sharded::local_of(const std::string& name, const at::Tensor& whole) const {
  return part_of(*engine_, find(*engine_, name), whole);
}

void Sharded::load_local_parameters(const Named& values) { engine_->write_parts(placed(*engine_, values)); }
void Sharded::load_gradients(const Named& values) { engine_->write_gradients(placed(*engine_, values)); }
void Sharded::load_local_gradients(const Named& values) { engine_->write_gradient_parts(placed(*engine_, values)); }

Named Sharded::local_gradients() const {
  engine_->show_gradients();
  const at::NoGradGuard no_grad;
  Named gradients;
  for (const auto& place : places_of(*engine_)) {
    const auto& parameter = parameter_at(*engine_, place);
    const at::Tensor& gradient = parameter.gradient();
    gradients.emplace_back(parameter.name, gradient.defined() ? gradient.clone() : gradient);
  }
  return gradients;
}

void Sharded::copy_to(Sharded& other) const {
  const at::NoGradGuard no_grad;
  Engine &from = *engine_, &to = *other.engine_;
  auto buffers = buffers_of(from), copies = buffers_of(to);
  if (const auto faults = differences(from, to) + differences(buffers, copies); !faults.empty())
    throw ConfigError("the sharded model can't be copied: " + faults.substr(2));
  from.settle();
  from.release_all();
  from.refuse_replaced();
  std::map<std::string, at::Tensor> ignored;  // by the copy
  for (const auto& [name, tensor] : to.ignored()) ignored[name] = tensor.detach();
  std::vector<Engine::NewValues> several;
  const auto give = [&](const std::string& name, const at::Tensor& values) {
    if (const auto found = ignored.find(name); found != ignored.end()) {
      found->second.copy_(values);
    } else {
      const auto place = find(to, name);
      several.push_back({place.unit, place.parameter, values});
    }
  };
  for (const auto& place : places_of(from)) {
    const auto& parameter = parameter_at(from, place);
    give(parameter.name, whole_of(from, place, parameter.shard.detach()));
    if (place.parameter + 1 < from.units()[place.unit]->parameters().size()) continue;
    to.write(several);
    several.clear();
  }
  for (const auto& [name, tensor] : from.ignored()) give(name, tensor.detach());
  to.write(several);
  for (auto& [name, copy] : copies)
    if (copy.defined()) copy.copy_(buffers.at(name));
}

}  // namespace tessera
