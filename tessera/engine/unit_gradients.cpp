// The half of Unit that moves gradients.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/base/check.h"
#include "tessera/engine/real_pairs.h"
#include "tessera/engine/unit.h"

namespace tessera {

at::Tensor Unit::readable_by_peers(const at::Tensor& gradient, ParameterIndex p) {
  if (communicator_.size() == 1 || communicator_.peers_can_read(gradient.const_data_ptr())) return gradient;
  at::Tensor copy = at::empty(gradient.sizes(), gradient.options());
  if (!communicator_.peers_can_read(copy.const_data_ptr())) {
    // Small blocks, and all blocks when the arena is full, come from the system's allocator.
    keep_staged_sum(p);
    copy = at::from_blob(staging_area_.get() + layout_.offset(p).value * taken_size_, gradient.sizes(), gradient.options());
    staging_ += Bytes(static_cast<int64_t>(gradient.nbytes()));
  }
  return copy.copy_(gradient);
}

// A sum that further gradients are added to must not lie where they are staged.
void Unit::keep_staged_sum(ParameterIndex p) {
  auto& parameter = parameters_[p];
  const int64_t at = layout_.offset(p).value * taken_size_;
  if (adds_up_where_shown() || !parameter.gradient().defined() || !parameter.sum.defined() ||
      parameter.sum.data_ptr() != staging_area_.get() + at)
    return;
  const bool shown_in_place = shows_reduced(p);
  parameter.sum = at::from_blob(sums_area_.get() + at, parameter.sum.sizes(), parameter.sum.options()).copy_(parameter.sum);
  staged_ += Bytes(static_cast<int64_t>(parameter.sum.nbytes()));
  if (shown_in_place) show_gradient_anew(p);
}

void Unit::take_gradient(ParameterIndex p, double weight, bool keep) {
  const at::NoGradGuard no_grad;
  auto& parameter = parameters_[p];
  at::Tensor gradient = std::move(parameter.tensor.mutable_grad());
  parameter.tensor.mutable_grad() = at::Tensor();
  gradient = gradient.detach();
  if (gradient.is_sparse()) gradient = gradient.to_dense();
  gradient = real_pairs(gradient.to(keep && working_type_is_narrow() ? master_type_ : module_type()).contiguous());
  if (weight != 1) gradient = gradient * weight;
  if (parameter.taken.defined())  // of an earlier micro-batch; or backward reaches it more than once, as recomputed parts do
    parameter.taken.add_(gradient);
  else
    parameter.taken = gradient;
  if (!parameter.arrived) ++arrivals;
  parameter.arrived = true;
}

void Unit::post() {
  if (round_ > 0) exchange_->wait_finished(round_, name_, 0);  // the offers of the round before may still be read
  for (ParameterIndex p = 0; p < parameters_.size(); ++p)
    if (auto& taken = parameters_[p].taken; taken.defined()) taken = readable_by_peers(taken.to(taken_type_), p);
  ++round_;
  lent = Bytes{};
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    auto& parameter = parameters_[p];
    exchange_->offer(p, parameter.taken.defined() ? parameter.taken.const_data_ptr() : nullptr);
    parameter.lent = std::move(parameter.taken);
    parameter.taken = at::Tensor();
    if (parameter.lent.defined()) lent += Bytes(static_cast<int64_t>(parameter.lent.nbytes()));
    parameter.arrived = false;
  }
  arrivals = 0;
  complete = true;
  staged_ = std::max(staged_, staging_);
  staging_ = Bytes{};
  exchange_->post(round_);
}

bool Unit::posted_by_all() const {
  for (int r = 0; r < communicator_.size(); ++r)
    if (!exchange_->posted(Rank(r), round_)) return false;
  return true;
}

std::chrono::nanoseconds Unit::wait_posted(int64_t step) { return exchange_->wait_posted(round_, name_, step); }
std::chrono::nanoseconds Unit::wait_posted_politely(int64_t step) {
  return exchange_->wait_posted_politely(round_, name_, step);
}

void Unit::reduce(double scale, GradientConsumer* consumer, int64_t step) {
  std::vector<const void*> sources;
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    auto& parameter = parameters_[p];
    sources.clear();
    for (int r = 0; r < communicator_.size(); ++r) {
      const void* gradient = exchange_->gradient(Rank(r), p);
      if (gradient == nullptr) continue;
      sources.push_back(gradient);
      if (r != communicator_.rank().value) reduced_bytes += count_of(parameter.summed) * taken_size_;
    }
    if (sources.empty()) {  // no rank used it: it has no gradient, which is not the same as zero
      if (consumer == nullptr || !parameter.has_gradient || !parameter.gradient().defined()) continue;
      take_in_shown(p, step);
      parameter.partial = division_.shares_sums();
      consume_sum(p, *consumer, step);  // of earlier rounds
      continue;
    }
    parameter.has_gradient = true;
    take_in_shown(p, step);
    reduce_parameter(p, {sources, element_of(taken_type_)}, scale, consumer, step);
  }
  if (gradients_sharded() || !division_.shares_sums()) return exchange_->finish(round_);
  offer_sums();
  exchange_->post_sums(round_);
}

void Unit::reduce_parameter(ParameterIndex p, const SumSources& from, double scale, GradientConsumer* consumer,
                            int64_t step) {
  auto& parameter = parameters_[p];
  const bool add_where_shown = adds_up_where_shown() && parameter.gradient().defined();
  const bool accumulate = !adds_up_where_shown() && (parameter.gradient().defined() || parameter.partial);
  parameter.partial = division_.shares_sums();
  if (!gradients_sharded()) prepare_sum(p, accumulate);
  // Where several ranks update the same elements, they need each other's sums. All must use the same: where sums are
  // rounded, the rounded one.
  const bool leave_sum = division_.shares_sums();
  const bool consume_now = consumer != nullptr && !accumulate && !add_where_shown && !(leave_sum && adds_up_where_shown());
  parameter.squares = 0;
  std::vector<const void*> sources(from.sources.size());
  for (const Run& run : parameter.summed) {
    for (size_t i = 0; i < sources.size(); ++i)
      sources[i] = static_cast<const std::byte*>(from.sources[i]) + run.begin * taken_size_;
    const SumSources here{sources, from.element};
    parameter.squares += consume_now
                             ? consumer->consume(piece_of(p, run, here, scale / loss_scale_, step, leave_sum)).squares
                             : squares_of(sum_sources(here, scale * kept_scale_ / loss_scale_, accumulate,
                                                      reduced_at(p, run), element_of(gradient_type_), run.count));
  }
  if (consume_now) return;
  if (!division_.shares_sums() && (consumer == nullptr || add_where_shown)) show_gradient(p);
  if (consumer != nullptr) consume_sum(p, *consumer, step);
}

void Unit::consume_sum(ParameterIndex p, GradientConsumer& consumer, int64_t step) {
  if (adds_up_where_shown() && parameters_[p].gradient().defined()) return consume_shown(p, consumer, step);
  for (const Run& run : parameters_[p].summed) {
    const void* sum = reduced_at(p, run);
    consumer.consume(piece_of(p, run, {{&sum, 1}, element_of(gradient_type_)}, 1.0 / kept_scale_, step));
  }
}

void Unit::prepare_sum(ParameterIndex p, bool accumulate) {
  auto& parameter = parameters_[p];
  if (accumulate && parameter.sum.defined()) return;
  // The sum of this rank's part takes the place of its own gradient, which nobody else reads there.
  parameter.sum = parameter.lent;
  if (parameter.sum.defined()) return;
  parameter.sum = at::from_blob(staging_area_.get() + layout_.offset(p).value * taken_size_, layout_.shape(p),
                                at::TensorOptions().dtype(taken_type_));
  staged_ = std::max(staged_, staging_ += Bytes(static_cast<int64_t>(parameter.sum.nbytes())));
}

std::byte* Unit::reduced(ParameterIndex p) const {
  if (gradients_sharded()) return gradient_.get();
  const at::Tensor& sum = parameters_[p].sum;
  return sum.defined() ? static_cast<std::byte*>(sum.data_ptr()) : nullptr;
}

GradientPiece Unit::piece_of(ParameterIndex p, const Run& run, const SumSources& from, double scale, int64_t step,
                             bool leave_sum) const {
  const bool separate = master_.data() != nullptr;
  return {.unit = index_,
          .parameter = static_cast<uint32_t>(p),
          .state_begin = run.local,
          .count = run.count,
          .step = step,
          .gradients = from,
          .scale = scale,
          .master = master_at(p, run),
          .master_element = element_of(master_type_),
          .working = separate ? working_at(p, run) : nullptr,
          .working_element = element_of(working_type_),
          .sum = leave_sum ? reduced_at(p, run) : nullptr,
          .sum_element = element_of(gradient_type_)};
}

template <class Action>
void Unit::for_each_sum_of_peers(ParameterIndex p, const Action& action) {
  const Rank me = communicator_.rank();
  for (int r = 0; r < communicator_.size(); ++r) {
    if (Rank(r) == me || division_.optimizer_part(Rank(r)) != division_.optimizer_part(me)) continue;
    for (const Run& run : division_.summed(layout_, p, Rank(r))) {
      reduced_bytes += run.count * gradient_size_;
      action(run, static_cast<const std::byte*>(exchange_->sum(Rank(r), p)) + reduced_distance(run));
    }
  }
}

std::chrono::nanoseconds Unit::gather_sums(GradientConsumer* consumer, double scale, int64_t step) {
  if (!division_.shares_sums()) return {};
  const auto spent = exchange_->wait_sums(round_, name_, step);
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    if (!std::exchange(parameters_[p].partial, false)) continue;
    for_each_sum_of_peers(p, [&](const Run& run, const void* sum) {
      if (consumer != nullptr)
        consumer->consume(piece_of(p, run, {{&sum, 1}, element_of(gradient_type_)}, scale / kept_scale_, step));
      else
        std::memcpy(reduced_at(p, run), sum, static_cast<size_t>(run.count * gradient_size_));
    });
    if (consumer == nullptr) show_gradient(p);
  }
  exchange_->finish(round_);
  return spent;
}

void Unit::offer_sums() {
  for (ParameterIndex p = 0; p < parameters_.size(); ++p)
    exchange_->offer_sum(p, parameters_[p].has_gradient ? reduced(p) : nullptr);
}

void Unit::take_sums(int64_t step) {
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    if (!parameters_[p].partial) continue;
    refuse_change_of_partial(p, step);
    for_each_sum_of_peers(p, [&](const Run& run, const void* sum) {
      std::memcpy(reduced_at(p, run), sum, static_cast<size_t>(run.count * gradient_size_));
    });
    parameters_[p].partial = false;
    show_gradient(p);
  }
}

// Gradients that were not dropped with their step are taken in anew from .grad, which is unscaled, before any are added.
void Unit::set_loss_scale(double scale) {
  loss_scale_ = scale;
  kept_scale_ = gradient_type_ == c10::ScalarType::Half ? scale : 1;
}

double Unit::squares_of(const SumResult& kept) const { return kept.squares / (kept_scale_ * kept_scale_); }

std::chrono::nanoseconds Unit::wait_finished(int64_t step) { return exchange_->wait_finished(round_, name_, step); }

bool Unit::take_back() {
  if (round_ == 0) return true;
  for (int r = 0; r < communicator_.size(); ++r)
    if (!exchange_->finished(Rank(r), round_)) return false;
  for (auto& parameter : parameters_) parameter.lent = at::Tensor();
  lent = Bytes{};
  return true;
}

bool Unit::shows_gradients() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p.gradient().defined(); });
}

bool Unit::any_gradient() const {
  return shows_gradients() ||
         std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p.has_gradient; });
}

void Unit::note_change() {
  if (std::exchange(change_noted_, true)) return;
  for (const auto& parameter : parameters_) parameter.tensor.unsafeGetTensorImpl()->bump_version();
}

void Unit::forget_gradients() {
  change_noted_ = false;
  for (auto& parameter : parameters_) {
    // A gradient that was not set to zero or none stays, as in torch: the next backward adds to it.
    parameter.has_gradient = parameter.gradient().defined();
    parameter.partial = false;
    if (parameter.has_gradient) continue;
    parameter.squares = 0;
    parameter.sum = at::Tensor();
  }
  shard_written = false;
  updated = false;
  expected_any = false;
}

}  // namespace tessera
