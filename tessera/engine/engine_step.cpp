// The part of Engine that ends a step.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/packed.h"
#include "tessera/base/text.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/hash.h"
#include "tessera/storage/caching_allocator.h"

namespace tessera {
void Engine::refuse_step(const char* what) const {
  if (phase_ == Phase::backward)
    throw GuardError(text(what, " inside backward (step ", step_, "); step the optimizer when backward has returned"));
  if (accumulating_ > 0)
    throw GuardError(text(what, " (step ", step_,
                          ") while Sharded::accumulating() is held, which says that more of its micro-batches follow; let "
                          "that end first"));
  refuse_in_scope(what);
}

bool Engine::run_step() {
  settle();
  refuse_step("the optimizer's step was called");
  release_all();
  refuse_replaced();
  if (rounds_ == 0 || local_pending_) synchronise();
  share_sums();
  if (reduction_pending_) {
    const bool fused = consumer_->fuses_reduction();
    // A sharded optimizer writes parameters that peers read until they come here.
    if (fused && any_unit([](const Unit& unit) { return unit.placements().optimizer == Placement::sharded; }))
      communicator_->barrier(text("optimizer step ", step_, " begins"));
    reduce_replicated(fused ? consumer_ : nullptr);
  }
  refuse_gradients_in_module();
  call_gradient_hooks();
  for (const auto& unit : units_) {
    if (unit->updated)
      unit->refuse_changed(step_);
    else
      unit->measure_changed();
  }
  const bool applied = agree_on_step();
  if (buffers_) buffers_->synchronise(*communicator_, took_part_);
  if (applied) note_changes();
  phase_ = Phase::stepping;
  const auto start = std::chrono::steady_clock::now();
  for (const auto& unit : units_)
    if (applied && !unit->updated) unit->consume_gradients(*consumer_, step_);
  traffic_.consume += std::chrono::steady_clock::now() - start;
  finish_step(applied);
  return applied;
}

// What is put there after the ranks' gradients were taken would be ignored.
void Engine::refuse_gradients_in_module() const {
  for (const auto& unit : units_)
    for (const auto& parameter : unit->parameters())
      if (parameter.tensor.grad().defined())
        throw GuardError(text("the .grad of the module's own parameter '", parameter.name, "' was set after backward (step ",
                              step_,
                              "), where no optimizer looks; change the .grad of Sharded::parameters() instead, or use "
                              "Sharded::clip_grad_norm"));
}

bool Engine::agree_on_outside_step() {
  release_all();
  if (consumer_ != nullptr && reduction_pending_) reduce_replicated(nullptr);
  share_sums();
  refuse_replaced();
  refuse_gradients_in_module();
  call_gradient_hooks();
  for (const auto& unit : units_) unit->measure_changed();
  const bool applied = agree_on_step();
  if (buffers_) buffers_->synchronise(*communicator_, took_part_);
  if (!applied) finish_step(false);
  return applied;
}

void Engine::begin_outside_step() {
  refuse_step("an operator wrote to a parameter shard");
  if (consumer_ != nullptr && (rounds_ > 0 || local_pending_))
    throw GuardError(
        text("an operator wrote to a parameter shard between backward and the step of tessera's AdamW (step ", step_,
             "), which updates all parameters; where another optimizer (Muon) has some of them, leave the others to "
             "one of torch::optim, and write to shards after the step"));
  if (spoilt_in_ > 0)
    throw GuardError(text("the optimizer's own state has taken in the gradients of step ", spoilt_in_,
                          ", which were not finite. Make a new optimizer or load its state, and call "
                          "Sharded::step(optimizer) instead of optimizer.step(), which looks at the gradients first"));
  const int64_t step = step_;
  bool applied = false;
  try {
    applied = agree_on_outside_step();
  } catch (const NonFiniteError&) {  // the optimizer has looked at its gradients before it writes
    spoilt_in_ = step;
    throw;
  }
  if (!applied) {
    spoilt_in_ = step;
    throw GuardError(text("step ", step,
                          " must be skipped because of a gradient that is not finite, but a torch::optim optimizer whose "
                          "step() is called can't be told; call Sharded::step(optimizer) instead, or use tessera::AdamW"));
  }
  note_changes();
  phase_ = Phase::stepping;
}

// What was saved for a backward holds other values from now on, which autograd must know. Not when the step is finished:
// that may come with the next forward's first operator, which has saved its parameters by then.
void Engine::note_changes() {
  for (size_t u = 0; u < units_.size(); ++u)
    if (updated_anywhere_[u] || units_[u]->shard_written) units_[u]->note_change();
}

bool Engine::run_step_of(const std::function<void()>& update, const std::vector<double>& rates) {
  if (consumer_ != nullptr)
    throw ConfigError("Sharded::step is for other optimizers, but this model has tessera's attached; call its step()");
  settle();
  refuse_step("the optimizer's step was called");
  make_reduced();
  outside_settings_ = hash_of_bytes(rates.data(), static_cast<int64_t>(rates.size() * sizeof(double)));
  const bool applied = agree_on_outside_step();
  outside_settings_ = 0;
  if (!applied) return false;
  spoilt_in_ = 0;
  phase_ = Phase::stepping;
  update();
  note_changes();
  finish_step(true);
  return true;
}

void Engine::finish_step(bool applied) {
  for (size_t u = 0; u < units_.size(); ++u) {
    const auto& unit = units_[u];
    const bool published = unit->updated && unit->gradients_sharded();
    if (applied && !published && (updated_anywhere_[u] || unit->shard_written)) {
      if (unit->shard_written) unit->write_working_from_master();
      unit->publish_next_epoch();
    }
    unit->forget_gradients();
    unit->touched_after_complete = false;
  }
  weight_ = 1.0;
  if (std::exchange(irregular_, false)) {
    schedule_.abandon_iteration();
  } else if (!schedule_.end_iteration() && !departed_) {
    departed_ = true;
    std::fprintf(stderr,
                 "tessera: rank %d: step %lld did less than the recorded schedule; it is recorded anew (said once)\n",
                 communicator_->rank().value, static_cast<long long>(step_));
  }
  tell_units_loss_scale();
  take_back_lent();
  if (const auto arena = CachingAllocator::instance().arena()) arena->age();
  communicator_->finished_step(step_);
  ++step_;
  took_part_.clear();
  hooks_called_ = false;
  sits_out_ = false;
  rounds_ = 0;
  backwards_ = 0;
  unconsumed_ = false;
  phase_ = Phase::idle;
}

// Legal, but mostly a slip: an optimizer that holds the model's own parameters finds no gradient, and does nothing.
void Engine::say_that_none_is_used() const {
  if (communicator_->rank() != Rank(0)) return;
  const auto unit = std::find_if(units_.begin(), units_.end(), [](const auto& each) { return each->trainable(); });
  if (unit == units_.end()) return;
  std::fprintf(
      stderr,
      "tessera: the gradients of two backwards were dropped by zero_grad, and no optimizer has used any (the first "
      "parameter is '%s' of unit '%s'). If one should have, build it from the shards (tessera::AdamW(sharded, …) or a "
      "torch::optim optimizer over sharded.parameters()), not from the model's own parameters (said once)\n",
      (*unit)->parameters().front().name.c_str(), (*unit)->name().c_str());
}

void Engine::zero_grad() {
  refuse_in_backward("zero_grad");
  settle();
  weight_ = 1.0;
  for (const auto& unit : units_)
    if (unit->updated)
      throw GuardError(text("the gradients of step ", step_,
                            " can't be dropped: with fused_reduction they have already "
                            "updated unit '",
                            unit->name(),
                            "'. Call the optimizer's step first, or construct it without "
                            "fused_reduction"));
  for (const uint32_t index : to_reduce_) {  // handed over, but nobody wants them any more
    units_[index]->drop_round();
    to_return_.push_back(index);
  }
  if (unconsumed_ && step_ == 1 && consumer_ == nullptr && ++dropped_ == 2) say_that_none_is_used();
  to_reduce_.clear();
  reduction_pending_ = false;
  sums_pending_ = false;
  local_pending_ = false;
  unconsumed_ = false;
  hooks_called_ = false;
  rounds_ = 0;
  backwards_ = 0;
  for (const auto& unit : units_) {
    for (auto& parameter : unit->parameters()) {
      parameter.shard.mutable_grad() = at::Tensor();
      parameter.tensor.mutable_grad() = at::Tensor();
      parameter.taken = at::Tensor();
      parameter.arrived = false;
    }
    unit->arrivals = 0;
    unit->forget_gradients();
  }
  take_back_lent();
}

double Engine::weight_by(double count, double total) {
  if (!(count >= 0 && std::isfinite(count) && total >= 0 && std::isfinite(total)))
    throw ConfigError(text("weight_by needs counts that are not negative, but got ", count, " of ", total));
  if (total == 0)
    for (const auto& theirs : communicator_->all_gather("counts of samples", packed(count)))
      total += unpacked<double>(theirs);
  if (total == 0) throw ConfigError("weight_by: no rank has any sample, so there is nothing to weight by");
  weigh(count * communicator_->size() / total);
  return weight_;
}

void Engine::weigh(double weight) {
  for (const auto& unit : units_) sweep_gradients(*unit);  // of earlier micro-batches, which this weight is not for
  weight_ = weight;
}

void Engine::make_clippable() {
  refuse_in_backward("a look at all gradients");
  if (consumer_ != nullptr && consumer_->fuses_reduction())
    throw ConfigError(
        "gradients and their norm are not known before the update when the optimizer takes them as they are reduced; "
        "construct it "
        "without fused_reduction");
  settle();
  make_reduced();
  call_gradient_hooks();
  for (const auto& unit : units_) unit->measure_changed();
}

void Engine::clip_gradient_values(double limit) {
  if (!(limit >= 0)) throw ConfigError(text("the limit of gradients' values must be 0 or more, but is ", limit));
  make_clippable();
  for (const auto& unit : units_) unit->clamp_gradients(limit);
}

double Engine::clip_gradient_norm(double max_norm, double norm_type) {
  if (!(max_norm >= 0)) throw ConfigError(text("the norm to clip gradients to must be 0 or more, but is ", max_norm));
  if (!(norm_type > 0)) throw ConfigError(text("norm_type must be more than 0 (2, 1, infinity …), but is ", norm_type));
  make_clippable();
  struct Facts {
    double sum, max_norm, norm_type;  // the sum of powers, or the largest of all
  } mine{0, max_norm, norm_type};
  const auto add = [norm_type](double& sum, double part) {
    sum = std::isinf(norm_type) && !std::isnan(part) ? std::max(sum, part) : sum + part;
  };
  for (const auto& unit : units_)
    for (ParameterIndex p = 0; p < unit->parameters().size(); ++p) add(mine.sum, unit->power_of_gradient(p, norm_type));
  double sum = 0;
  for (const auto& bytes : communicator_->all_gather("gradient norm", packed(mine))) {
    const auto theirs = unpacked<Facts>(bytes);
    if (theirs.max_norm != max_norm || theirs.norm_type != norm_type)
      throw AgreementError(text("step ", step_, ": ranks clip gradients to different norms, ", max_norm, " of type ",
                                norm_type, " (rank ", communicator_->rank().value, ") and ", theirs.max_norm, " of type ",
                                theirs.norm_type));
    add(sum, theirs.sum);
  }
  const double norm = std::isinf(norm_type) ? sum : norm_type == 2 ? std::sqrt(sum) : std::pow(sum, 1 / norm_type);
  const double coefficient = std::isinf(max_norm) ? 1.0 : std::min(1.0, max_norm / (norm + 1e-6));
  if (coefficient != 1.0)
    for (const auto& unit : units_) unit->scale_gradients(coefficient);
  return norm;
}

}  // namespace tessera
