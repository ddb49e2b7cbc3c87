#include "tessera/engine/engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/any.h>
#include <ATen/ops/isfinite.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/backward_end.h"

namespace tessera {
namespace {

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

Engine::Engine(std::shared_ptr<Communicator> communicator, const EngineSettings& settings, std::vector<UnitSpec> specs)
    : communicator_(std::move(communicator)),
      precision_(settings.precision),
      non_finite_(settings.non_finite),
      scale_(1.0 / settings.gradient_divisor),
      scaler_(settings.loss_scale),
      ignored_(settings.ignored),
      other_names_(settings.other_names),
      parameters_now_(settings.parameters_now),
      unwinding_(std::uncaught_exceptions()) {
  register_observer();
  for (auto& spec : specs) {
    settings.prepare(spec);
    const auto index = static_cast<uint32_t>(units_.size());
    units_.push_back(std::make_unique<Unit>(std::move(spec), index, settings.precision, *communicator_, *this));
  }
  watch_gradients();
  watch_missing_gradients();
  tell_units_loss_scale();
}

Engine::~Engine() {
  *self_ = nullptr;
  for (const auto& unit : units_)
    for (const auto& parameter : unit->parameters()) GradientHook::take_away(*this, parameter.tensor);
  if (std::uncaught_exceptions() > unwinding_) communicator_->fail("an exception ended it");
  if (std::uncaught_exceptions() > unwinding_ || phase_ != Phase::stepping) return;
  for (const auto& unit : units_) {  // peers may still want to read what an outside optimizer wrote last
    if (unit->shard_written) unit->write_working_from_master();
    unit->publish_next_epoch();
  }
}

Traffic Engine::traffic() const {
  Traffic traffic = traffic_;
  for (const auto& unit : units_) {
    traffic.gathered += Bytes(unit->gathered_bytes);
    traffic.reduced += Bytes(unit->reduced_bytes);
  }
  return traffic;
}

std::string Engine::schedule() const {
  std::vector<std::string> names;
  for (const auto& unit : units_) names.push_back(unit->name());
  return schedule_.print(names);
}

void Engine::note(StepKind kind, uint32_t unit) {
  if (!training_pass_) return;
  if (schedule_.note({kind, phase_, unit}) || departed_) return;
  departed_ = true;
  std::fprintf(stderr,
               "tessera: rank %d, step %lld: the order of operators changed at the %s of unit '%s'; it is recorded anew "
               "(said once)\n",
               communicator_->rank().value, static_cast<long long>(step_), name_of(kind), units_[unit]->name().c_str());
}

void Engine::attach(GradientConsumer* consumer) {
  if (consumer != nullptr && consumer_ != nullptr)
    throw ConfigError("this sharded model already has an optimizer attached; destroy it before making another");
  if (consumer != nullptr && consumer->fuses_reduction() && (non_finite_ == NonFinite::skip || scaler_.changes()))
    throw ConfigError(
        "a step can't be skipped after the update, and with fused_reduction that is when a gradient that is not finite is "
        "found; "
        "use non_finite = stop and no loss scale or a fixed one, or construct the optimizer without fused_reduction");
  refuse_hooks_with(consumer);
  consumer_ = consumer;
}

bool Engine::updates_in_backward(const Unit& unit) const {
  // The first step is always done apart: it shows which units are used after their gradients are complete.
  return unit.gradients_sharded() && !unit.shares_sums() && consumer_ != nullptr && consumer_->fuses_reduction() &&
         step_ > 1 && accumulating_ == 0;
}

// ---- access --------------------------------------------------------------------------------------------------------

void Engine::before(std::span<const Access> accesses, std::string_view) {
  const bool backward = in_backward();
  if (accesses.size() == 1 && accesses[0].what->kind == Observed::Kind::unit && !accesses[0].writes &&
      phase_ == (backward ? Phase::backward : Phase::forward) && unit_of(accesses[0]).residency() == Residency::resident &&
      (training_pass_ || !at::GradMode::is_enabled()) && !nested_ended_)
    return;
  if (backward) go_on_after_nested_backward();
  bool units = false, shard_writes = false;
  for (const auto& access : accesses) {
    units |= access.what->kind == Observed::Kind::unit;
    if (access.what->kind != Observed::Kind::shard || !access.writes) continue;
    shard_writes = true;
    unit_of(access).shard_written = true;
  }
  if (shard_writes && phase_ != Phase::stepping) begin_outside_step();
  if (shard_writes)
    for (const auto& access : accesses)
      if (access.what->kind == Observed::Kind::shard && access.writes) unit_of(access).note_change();
  if (!units) return;
  if (backward && phase_ != Phase::backward) enter_backward();
  if (!backward && phase_ != Phase::forward) enter_forward();
  if (!training_pass_ && (backward || at::GradMode::is_enabled())) begin_training_pass();
  touch_units(accesses);
}

void Engine::touch_units(std::span<const Access> accesses) {
  const auto touched = [&](uint32_t index) {
    return std::any_of(accesses.begin(), accesses.end(), [&](const auto& access) {
      return access.what->kind == Observed::Kind::unit && access.what->unit == index;
    });
  };
  const auto resident = resident_;
  for (const uint32_t index : resident)
    if (!touched(index) && !stays(*units_[index])) release(index);
  for (const auto& access : accesses) {
    if (access.what->kind != Observed::Kind::unit) continue;
    touch(unit_of(access), access.what->unit);
    if (access.writes) unit_of(access).begin_edit();
  }
}

bool Engine::stays(const Unit& unit) const {
  return unit.holders > 0 || (unit.kept_after_forward() && training_pass_ && !unit.complete && !unit.edited());
}

void Engine::touch(Unit& unit, uint32_t index) {
  if (phase_ == Phase::backward && unit.complete) {
    if (updates_in_backward(unit))
      throw GuardError(text("unit '", unit.name(),
                            "' is used in backward after all its gradients had come and its parameters were updated (step ",
                            step_, "); construct the optimizer without fused_reduction for this model"));
    unit.touched_after_complete = true;
  }
  if (unit.residency() == Residency::resident) return;
  gather(index);
  note(StepKind::gather, index);
}

void Engine::gather(uint32_t index) {
  traffic_.gather_wait += units_[index]->gather(step_);
  ++traffic_.gathers;
  resident_.push_back(index);
}

void Engine::release(uint32_t index) {
  Unit& unit = *units_[index];
  std::erase(resident_, index);
  if (unit.edited()) return keep_edit(unit);
  unit.release();
  note(StepKind::release, index);
}

void Engine::keep_edit(Unit& unit) {
  // The owner's part of what was written becomes the parameter, once nobody reads the old one any more. So all must have
  // written the same.
  try {
    agree_on_values(text("write to unit '", unit.name(), "'"), unit.hashes(),
                    [&](size_t p) { return unit.parameters()[p].name; });
  } catch (...) {
    unit.drop_edit();
    throw;
  }
  unit.keep_edit();
  unit.publish_next_epoch();
}

void Engine::release_all() {
  const auto resident = resident_;
  release_units(resident);
}

void Engine::after(std::span<const Access> accesses, std::span<const c10::IValue> results, std::string_view operation) {
  if (!watching_ || !first_non_finite_.empty()) return;
  const at::NoGradGuard no_grad;
  for (const auto& result : results) {
    if (!result.isTensor() || !result.toTensor().is_floating_point() || at::isfinite(result.toTensor()).all().item<bool>())
      continue;
    first_non_finite_ = text(operation, " of unit '", unit_of(accesses[0]).name(), "'");
    return;
  }
}

void Engine::watch_non_finite(bool on) {
  watching_ = on;
  if (on) first_non_finite_.clear();
}

// ---- phases --------------------------------------------------------------------------------------------------------

void Engine::settle() {
  if (nested_ended_ && !in_backward()) end_backward();
  if (phase_ == Phase::stepping) finish_step(true);
}

void Engine::enter_forward() {
  settle();
  if (phase_ == Phase::backward)
    throw GuardError(text("the backward of step ", step_,
                          " ended early with an exception; the gradients of this step are incomplete on this rank. "
                          "Destroy the sharded model and start again from the last checkpoint"));
  training_pass_ = false;
  phase_ = Phase::forward;
}

void Engine::begin_training_pass() {
  refuse_if_sitting_out();
  refuse_unconsumed();
  refuse_replaced();
  refuse_other_tensors();
  watch_gradients();  // a user's hook may have taken the place of the engine's
  release_all();      // what an evaluation left resident is not part of the iteration
  training_pass_ = true;
}

void Engine::refuse_unconsumed() const {
  if (!unconsumed_ || accumulating_ > 0) return;
  std::string first;
  for (const auto& unit : units_)
    for (const auto& parameter : unit->parameters())
      if (first.empty() && parameter.gradient().defined())
        first = text(" (the first is that of parameter '", parameter.name, "' of unit '", unit->name(), "')");
  const bool used_as_they_come = reduction_pending_ || (consumer_ != nullptr && consumer_->fuses_reduction());
  if (first.empty() && !used_as_they_come) return;  // they were dropped on purpose
  throw GuardError(
      text("the gradients of step ", step_, first,
           " were reduced, but no optimizer used them. Build the optimizer from the shards "
           "(tessera::AdamW(sharded, …) or a torch::optim optimizer over sharded.parameters()), not from the "
           "model's own parameters, and "
           "call step(), or Sharded::step(optimizer) where it may have nothing to update on this rank, as Muon; "
           "for several micro-batches a step hold sharded.accumulating() over all but the last; "
           "for evaluation hold a NoGradGuard"));
}

void Engine::go_on_after_nested_backward() {
  if (!std::exchange(nested_ended_, false)) return;
  at_end_of_backward([this] { end_outermost_backward(); });
}

// Legal, as in torch, but mostly a slip: Module::zero_grad reaches no shard. Looked at once, in the second step.
void Engine::say_that_gradients_add_up() const {
  const at::NoGradGuard no_grad;
  for (const auto& unit : units_)
    for (const auto& parameter : unit->parameters()) {
      const at::Tensor& gradient = parameter.gradient();
      if (!gradient.defined() || !gradient.any().item<bool>()) continue;
      std::fprintf(
          stderr,
          "tessera: rank %d, step 2: the gradient of parameter '%s' was not dropped after step 1, so this step's is "
          "added to it. If that is not meant, call zero_grad() of the optimizer or of the sharded model: that of the "
          "module does not reach the shards (said once)\n",
          communicator_->rank().value, parameter.name.c_str());
      return;
    }
}

void Engine::end_outermost_backward() {
  end_backward();
  if (phase_ == Phase::idle) release_all();  // frozen units that backward used last: no gradient of theirs released them
}

void Engine::expect_gradients() {
  for (const auto& unit : units_) {
    unit->complete = false;
    unit->late = false;
    unit->expected = unit->count_trainable();
    unit->expected_any |= unit->expected > 0;
  }
}

void Engine::enter_backward() {
  settle();
  refuse_in_scope("backward");
  refuse_if_sitting_out();
  refuse_more_gradients();
  // A further backward adds to the gradients of the one before, unless those were used while they came.
  if (consumer_ != nullptr && consumer_->fuses_reduction()) refuse_unconsumed();
  if (reduction_pending_) make_reduced();
  if (step_ == 2 && rounds_ == 0) say_that_gradients_add_up();
  phase_ = Phase::backward;
  arrivals_ = false;
  expect_gradients();
  at_end_of_backward([this] { end_outermost_backward(); });
}

}  // namespace tessera
