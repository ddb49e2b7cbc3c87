#include "tessera/engine/ema.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/parts.h"

namespace tessera {

Ema::Ema(const Sharded& sharded, double decay) : engine_(sharded.shared_engine()) {
  set_decay(decay);
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  for (const auto& place : places_of(*engine_)) {
    const Unit& unit = *engine_->units()[place.unit];
    if (!trainable_type(unit.working_type())) continue;
    averages_.push_back({place, parameter_at(*engine_, place).shard.detach().clone()});
  }
}

void Ema::set_decay(double decay) {
  if (!(decay >= 0 && decay <= 1)) throw ConfigError(text("the decay of an average must be in [0, 1], but is ", decay));
  decay_ = decay;
}

void Ema::refuse_swapped(const char* what) const {
  if (swapped_)
    throw GuardError(text(what, " while the averages are the model's parameters (step ", engine_->step(),
                          "); call Ema::swap once more first"));
}

void Ema::update() {
  refuse_swapped("an average can't be updated");
  const at::NoGradGuard no_grad;
  for (auto& average : averages_) average.value.lerp_(parameter_at(*engine_, average.place).shard.detach(), 1 - decay_);
  ++updates_;
}

// A unit at a time, so that only one unit's parameters are in memory twice.
template <class Action>
void Ema::write_by_unit(const Action& after) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0, end; i < averages_.size(); i = end) {
    std::vector<Engine::NewValues> values;
    std::vector<at::Tensor> before;
    for (end = i; end < averages_.size() && averages_[end].place.unit == averages_[i].place.unit; ++end) {
      values.push_back({averages_[end].place.unit, averages_[end].place.parameter, averages_[end].value});
      before.push_back(parameter_at(*engine_, averages_[end].place).shard.detach().clone());
    }
    engine_->write_parts(values);
    for (size_t k = i; k < end; ++k) after(averages_[k], before[k - i]);
  }
}

void Ema::swap() {
  engine_->settle();
  if (swapped_ && engine_->step() != swapped_at_)
    throw GuardError(text("the averages were swapped in at step ", swapped_at_, ", and now it is step ", engine_->step(),
                          ": steps in between trained the averages, not the parameters; swap back before the next step"));
  write_by_unit([](Average& average, const at::Tensor& before) { average.value.copy_(before); });
  swapped_ = !swapped_;
  swapped_at_ = engine_->step();
}

void Ema::copy_to_parameters() {
  refuse_swapped("averages can't be copied to the parameters");
  write_by_unit([](Average&, const at::Tensor&) {});
}

Ema::Named Ema::local() const {
  refuse_swapped("averages can't be read");
  Named named;
  for (const auto& average : averages_) named.emplace_back(parameter_at(*engine_, average.place).name, average.value);
  return named;
}

Ema::Named Ema::full() const {
  refuse_swapped("averages can't be read");
  Named named;
  for (const auto& average : averages_)
    named.emplace_back(parameter_at(*engine_, average.place).name, whole_of(*engine_, average.place, average.value));
  return named;
}

void Ema::load(const Named& values, int64_t updates, bool whole) {
  refuse_swapped("averages can't be written");
  const at::NoGradGuard no_grad;
  std::vector<std::pair<Average*, at::Tensor>> all;
  for (const auto& [name, value] : values) {
    const auto place = find(*engine_, name);
    for (auto& average : averages_) {
      if (average.place != place) continue;
      const at::Tensor part = whole ? part_of(*engine_, place, value) : value;
      if (part.sizes() != average.value.sizes())
        throw ConfigError(text("this rank's part of the average of '", name, "' has the shape ",
                               c10::str(average.value.sizes()), ", but what was given has ", c10::str(part.sizes()),
                               " (rank ", engine_->communicator().rank().value, ")"));
      all.emplace_back(&average, part);
    }
  }
  for (auto& [average, part] : all) average->value.copy_(part);
  updates_ = updates;
}

void Ema::load_local(const Named& values, int64_t updates) { load(values, updates, false); }
void Ema::load_full(const Named& values, int64_t updates) { load(values, updates, true); }

}  // namespace tessera
