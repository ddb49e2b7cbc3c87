// The part of Engine that hands gradients over and reduces them.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/backward_end.h"
#include "tessera/engine/engine.h"

namespace tessera {
namespace {

constexpr size_t kRunAhead = 1;  // units that a rank posts beyond one that its peers have not posted yet

using Clock = std::chrono::steady_clock;

}  // namespace

void Engine::on_gradient(uint32_t index, ParameterIndex p) {
  go_on_after_nested_backward();
  if (phase_ != Phase::backward) enter_backward();
  arrivals_ = true;
  Unit& unit = *units_[index];
  if (unit.replaced(p)) refuse_replaced();
  if (scaler_.in_use() && !loss_was_scaled_) refuse_unscaled(unit.parameters()[p].name);
  if (keeps_local_gradients(unit)) {  // autograd goes on adding to it, unless that rounds or each part has its own weight
    if (weight_ != 1 || unit.working_type_is_narrow()) unit.take_gradient(p, weight_, true);
    return;
  }
  if (unit.complete) start_another_round(index, p);
  unit.take_gradient(p, weight_);
  // What is used again later is handed over at the end of backward, so that there is one round of it a backward; and what
  // may be, where a rank without a batch would not learn of a second round.
  if (unit.arrivals == unit.expected && !unit.late && !unit.posts_at_end && unit.gradients_sharded()) {
    if (unit.shown || !some_sit_out_) {
      unit.shown = true;
      post(index);
    } else {
      irregular_ = true;
    }
  }
  serve_peers();
}

// Backward has reached a unit again whose gradients were handed over: the first step in which this happens to the unit,
// since the ranks tell each other at its end.
void Engine::start_another_round(uint32_t index, ParameterIndex p) {
  Unit& unit = *units_[index];
  if (updates_in_backward(unit))
    throw GuardError(text("a second gradient of parameter '", unit.parameters()[p].name,
                          "' came in one backward, after the first had updated it (step ", step_,
                          "), which no step before showed; construct the optimizer without fused_reduction for this model"));
  while (std::find(to_reduce_.begin(), to_reduce_.end(), index) != to_reduce_.end()) reduce_oldest();
  unit.complete = false;
  unit.late = true;
  unit.touched_after_complete = true;
}

void Engine::post(uint32_t index) {
  Unit& unit = *units_[index];
  if (unit.residency() == Residency::resident) release(index);
  if (updates_in_backward(unit)) unit.expect_next_epoch();
  lent_ -= unit.lent;  // its round before, if that was not taken back
  unit.post();
  note(StepKind::reduce, index);
  to_reduce_.push_back(index);
  lent_ += unit.lent;
  traffic_.peak_lent = std::max(traffic_.peak_lent, lent_);
}

void Engine::sweep_gradients(Unit& unit) {
  for (ParameterIndex p = 0; p < unit.parameters().size(); ++p)
    if (unit.parameters()[p].tensor.grad().defined()) unit.take_gradient(p, 1.0);
}

void Engine::post_rest(bool keep_local) {
  for (uint32_t index = 0; index < units_.size(); ++index) {
    Unit& unit = *units_[index];
    // One that was frozen after a micro-batch still has the gradients of that, where these are kept here.
    const bool takes_part = unit.trainable() || (local_pending_ && !unit.gradients_sharded() && unit.expected_any);
    if (unit.complete || !takes_part || (keep_local && keeps_local_gradients(unit))) continue;
    sweep_gradients(unit);
    post(index);
  }
}

void Engine::serve_peers() {
  while (!to_reduce_.empty()) {
    Unit& oldest = *units_[to_reduce_.front()];
    if (!oldest.posted_by_all()) {
      if (to_reduce_.size() <= kRunAhead) break;
      traffic_.reduce_wait += oldest.wait_posted_politely(step_);
      if (!oldest.posted_by_all()) break;
    }
    reduce_oldest();
  }
  take_back_lent();
}

void Engine::reduce_oldest() {
  reduce(to_reduce_.front());
  to_reduce_.pop_front();
}

void Engine::take_back_lent() {
  std::erase_if(to_return_, [&](uint32_t index) {
    const Bytes lent = units_[index]->lent;
    if (!units_[index]->take_back()) return false;
    lent_ -= lent;
    return true;
  });
}

void Engine::reduce(uint32_t index) {
  Unit& unit = *units_[index];
  auto* consumer = updates_in_backward(unit) ? consumer_ : nullptr;
  traffic_.reduce_wait += unit.wait_posted(step_);
  const auto start = Clock::now();
  unit.reduce(scale_, consumer, step_);
  (consumer ? traffic_.consume : traffic_.reduce_wait) += Clock::now() - start;
  if (consumer != nullptr) {
    unit.updated = true;
    unit.publish_expected_epoch();
  }
  ++traffic_.reductions;
  to_return_.push_back(index);
}

void Engine::end_backward() {
  if (phase_ != Phase::backward) return;
  // A backward that a node of another one ran, without NestedBackward: the other goes on. Ends with the next operator or
  // gradient of that, or before whatever follows it.
  nested_ended_ = inside_node();
  if (nested_ended_) return;
  loss_was_scaled_ = false;
  hand_over(arrivals_);
  if (!arrivals_) return;  // torch::autograd::grad, in forward perhaps: what was said of the next gradients still holds
  ++backwards_;
  weight_ = 1.0;
  some_sit_out_ = false;
}

// The end of a backward: what is not kept for a later one is reduced, if there is anything.
void Engine::hand_over(bool arrivals) {
  const auto kept = [this](const Unit& unit) { return keeps_local_gradients(unit); };
  const bool keep_local = any_unit(kept);
  if (arrivals && any_unit([&](const Unit& unit) { return !kept(unit); })) synchronise(keep_local);
  if (keep_local) local_pending_ = true;
  phase_ = Phase::idle;
}

void Engine::synchronise(bool keep_local) {
  phase_ = Phase::backward;
  post_rest(keep_local);
  std::deque<uint32_t> replicated;
  for (; !to_reduce_.empty(); to_reduce_.pop_front()) {
    const uint32_t index = to_reduce_.front();
    if (units_[index]->gradients_sharded())
      reduce(index);
    else
      replicated.push_back(index);
  }
  to_reduce_ = std::move(replicated);
  take_back_lent();
  sums_pending_ = any_unit([](const Unit& unit) { return unit.gradients_sharded() && unit.shares_sums(); });
  // What adds up in the shards' .grad has to be whole each time.
  const bool whole = any_unit([](const Unit& unit) { return unit.gradients_sharded() && unit.adds_up_where_shown(); });
  if (accumulating_ == 0 || consumer_ == nullptr || whole) share_sums();
  if (consumer_ != nullptr)
    reduction_pending_ = !to_reduce_.empty();
  else
    reduce_replicated(nullptr);
  for (const auto& unit : units_) unit->complete = false;
  local_pending_ = false;
  unconsumed_ = accumulating_ == 0;
  ++rounds_;
  phase_ = Phase::idle;
}

void Engine::reduce_replicated(GradientConsumer* consumer) {
  // Gradients that were not dropped, in a wider type than those that come: all are used when they are added up.
  if (any_unit([](const Unit& unit) { return unit.adds_up_where_shown() && unit.shows_gradients(); })) consumer = nullptr;
  const std::vector<uint32_t> indices(to_reduce_.begin(), to_reduce_.end());
  const auto timed = [&](auto&& action) {
    const auto start = Clock::now();
    action();
    (consumer ? traffic_.consume : traffic_.reduce_wait) += Clock::now() - start;
  };
  for (const uint32_t index : indices) {
    traffic_.reduce_wait += units_[index]->wait_posted(step_);
    timed([&] { units_[index]->reduce(scale_, consumer, step_); });
    if (consumer != nullptr) units_[index]->updated = true;
    ++traffic_.reductions;
    to_return_.push_back(index);
  }
  for (const uint32_t index : indices)
    timed([&] { traffic_.reduce_wait += units_[index]->gather_sums(consumer, 1.0, step_); });
  // Whoever sees the gradients may write to them, so the peers must have read them.
  for (const uint32_t index : indices)
    if (consumer == nullptr) traffic_.reduce_wait += units_[index]->wait_finished(step_);
  to_reduce_.clear();
  reduction_pending_ = false;
  take_back_lent();
}

// Replicas of a sharded gradient: each rank has summed a part of what it updates, and takes the rest from the other replicas
// (an all-reduce of the shards, of which the reduce-scatter is done).
void Engine::share_sums() {
  if (!std::exchange(sums_pending_, false)) return;
  const auto start = Clock::now();
  const auto each = [this](auto action) {
    for (const auto& unit : units_)
      if (unit->gradients_sharded() && unit->shares_sums()) action(*unit);
  };
  each([](Unit& unit) { unit.offer_sums(); });
  communicator_->barrier(text("gradients of step ", step_, " are summed"));
  each([this](Unit& unit) { unit.take_sums(step_); });
  communicator_->barrier(text("gradients of step ", step_, " are exchanged"));
  traffic_.reduce_wait += Clock::now() - start;
}

void Engine::make_reduced() {
  if (rounds_ == 0 || local_pending_) synchronise();
  if (reduction_pending_) reduce_replicated(nullptr);
  share_sums();
}

}  // namespace tessera
