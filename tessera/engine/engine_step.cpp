// The part of Engine that ends a step.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/packed.h"
#include "tessera/base/text.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/hash.h"
#include "tessera/storage/caching_allocator.h"

namespace tessera {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// What each rank says at a step; travels as bytes between processes of one build.
struct StepFacts {
  int64_t step;
  int32_t backwards;
  int32_t looks;                     // for gradients where there were none, since the step before
  uint32_t bad_unit, bad_parameter;  // first with a gradient that is not finite, or kNone
  double loss_scale;
  uint64_t trainable;  // hash of which parameters require a gradient
  uint64_t settings;   // of the attached optimizer
};

uint64_t trainable_of(const std::vector<std::unique_ptr<Unit>>& units) {
  std::string flags;
  for (const auto& unit : units)
    for (const auto& parameter : unit->parameters()) flags += parameter.tensor.requires_grad() ? '1' : '0';
  return hash_of_bytes(flags.data(), static_cast<int64_t>(flags.size()));
}

StepFacts facts_of(const std::vector<std::unique_ptr<Unit>>& units, StepFacts facts) {
  for (uint32_t u = 0; u < units.size(); ++u)
    for (uint32_t p = 0; p < units[u]->parameters().size(); ++p) {
      if (std::isfinite(units[u]->parameters()[p].squares)) continue;
      facts.bad_unit = u;
      facts.bad_parameter = p;
      return facts;
    }
  return facts;
}

}  // namespace

bool Engine::agree_on_step() {
  const int32_t backwards = std::max(1, backwards_);  // a rank without any takes part with nothing
  const int32_t looks = take_looks();
  StepFacts first_bad{step_,
                      backwards,
                      looks,
                      kNone,
                      kNone,
                      scaler_.scale(),
                      trainable_of(units_),
                      consumer_ != nullptr ? consumer_->settings() : 0};
  std::string mine = packed(facts_of(units_, first_bad));
  for (const auto& unit : units_) mine += unit->any_gradient() ? '1' : '0';
  const auto answers = communicator_->all_gather(text("optimizer step ", step_), mine);
  updated_anywhere_.assign(units_.size(), false);
  int bad_rank = 0;
  for (int r = 0; r < communicator_->size(); ++r) {
    const std::string& answer = answers[static_cast<size_t>(r)];
    const auto facts = unpacked<StepFacts>(answer);
    for (size_t u = 0; u < units_.size(); ++u)
      updated_anywhere_[u] = updated_anywhere_[u] || answer.at(sizeof(StepFacts) + u) == '1';
    if (facts.looks != looks)
      throw AgreementError(text("step ", step_, ": since the step before, rank ", r, " has looked ", facts.looks,
                                " times for gradients of its shards where there were none, rank ",
                                communicator_->rank().value, " ", looks,
                                " times. An optimizer's step that finds none on one rank takes no part in the step of the "
                                "others, so gradients of different steps were added. Where a rank may have none, call "
                                "Sharded::step(optimizer) instead of optimizer.step(), or Sharded::join"));
    if (facts.backwards != backwards)
      throw AgreementError(text("step ", step_, ": rank ", r, " handed over the gradients of ", facts.backwards,
                                " backwards, rank ", communicator_->rank().value, " of ", backwards,
                                "; all ranks must run the same number of backwards a step"));
    if (facts.loss_scale != scaler_.scale())
      throw AgreementError(text("step ", step_, ": the loss scale of rank ", r, " is ", facts.loss_scale, ", that of rank ",
                                communicator_->rank().value, " is ", scaler_.scale(),
                                "; set the same loss-scale state on all ranks"));
    const auto require_same = [&](bool same, const char* what) {
      if (!same)
        throw AgreementError(text("step ", step_, ": ranks ", r, " and ", communicator_->rank().value, " differ in ", what));
    };
    require_same(facts.trainable == first_bad.trainable,
                 "which parameters require a gradient; call set_requires_grad alike on all ranks");
    require_same(
        facts.settings == first_bad.settings,
        "the optimizer's options, such as its learning rate; each rank would update its part of the parameters by its "
        "own");
    if (facts.bad_unit < first_bad.bad_unit ||
        (facts.bad_unit == first_bad.bad_unit && facts.bad_parameter < first_bad.bad_parameter)) {
      first_bad = facts;
      bad_rank = r;
    }
  }
  if (first_bad.bad_unit == kNone) {
    scaler_.applied();
    return true;
  }
  const Unit& unit = *units_[first_bad.bad_unit];
  const std::string what =
      text("step ", step_, ": the gradient of parameter '", unit.parameters()[first_bad.bad_parameter].name, "' (unit '",
           unit.name(), "') is not finite; rank ", bad_rank, " found it in the part that it reduces");
  const bool backs_off = scaler_.can_back_off();  // if not, it is at its minimum, or there is none
  if (!backs_off && non_finite_ == NonFinite::stop)
    throw NonFiniteError(
        what + (scaler_.in_use() ? text(". The loss scale, ", scaler_.scale(), ", can't be lowered") : std::string()) +
        ". Lower the learning rate, clip gradients, look at the data of this step, or set non_finite = skip");
  ++skipped_;
  scaler_.back_off();
  if (communicator_->rank().value == 0)
    std::fprintf(stderr, "tessera: %s; the step is skipped (%lld so far)%s\n", what.c_str(),
                 static_cast<long long>(skipped_),
                 backs_off ? text(", the loss scale is ", scaler_.scale(), " from now on").c_str() : "");
  return false;
}

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
  const int64_t step = step_;
  if (!agree_on_outside_step())
    throw GuardError(text("step ", step,
                          " must be skipped because of a gradient that is not finite, but a torch::optim optimizer whose "
                          "step() is called can't be told; call Sharded::step(optimizer) instead, or use tessera::AdamW"));
  phase_ = Phase::stepping;
}

bool Engine::run_step_of(const std::function<void()>& update) {
  if (consumer_ != nullptr)
    throw ConfigError("Sharded::step is for other optimizers, but this model has tessera's attached; call its step()");
  settle();
  refuse_step("the optimizer's step was called");
  make_reduced();
  if (!agree_on_outside_step()) return false;
  phase_ = Phase::stepping;
  update();
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
  }
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

void Engine::zero_grad() {
  settle();
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

double Engine::clip_gradient_norm(double max_norm) {
  if (!(max_norm >= 0)) throw ConfigError(text("the norm to clip gradients to must be 0 or more, but is ", max_norm));
  make_clippable();
  struct Facts {
    double squares = 0, max_norm;
  } mine{0, max_norm};
  for (const auto& unit : units_)
    for (const auto& parameter : unit->parameters()) mine.squares += parameter.squares;
  double squares = 0;
  for (const auto& bytes : communicator_->all_gather("gradient norm", packed(mine))) {
    const auto theirs = unpacked<Facts>(bytes);
    if (theirs.max_norm != max_norm)
      throw AgreementError(text("step ", step_, ": ranks clip gradients to different norms, ", max_norm, " (rank ",
                                communicator_->rank().value, ") and ", theirs.max_norm));
    squares += theirs.squares;
  }
  const double norm = std::sqrt(squares);
  const double coefficient = std::isinf(max_norm) ? 1.0 : std::min(1.0, max_norm / (norm + 1e-6));
  if (coefficient != 1.0)
    for (const auto& unit : units_) unit->scale_gradients(coefficient);
  return norm;
}

}  // namespace tessera
