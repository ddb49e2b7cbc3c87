// The half of Unit that moves gradients.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "tessera/base/check.h"
#include "tessera/engine/unit.h"

namespace tessera {

at::Tensor Unit::readable_by_peers(const at::Tensor& gradient, ParameterIndex p) {
  if (layout_.ranks() == 1 || communicator_.peers_can_read(gradient.const_data_ptr())) return gradient;
  at::Tensor copy = at::empty(gradient.sizes(), gradient.options());
  if (!communicator_.peers_can_read(copy.const_data_ptr())) {
    // Small blocks, and all blocks when the arena is full, come from the system's allocator.
    if (round_ > 0) exchange_->wait_finished(round_, name_, 0);
    copy = at::from_blob(staging_area_.get() + layout_.offset(p).value * layout_.element_size(), gradient.sizes(),
                         gradient.options());
    staging_ += Bytes(static_cast<int64_t>(gradient.nbytes()));
  }
  return copy.copy_(gradient);
}

void Unit::take_gradient(ParameterIndex p) {
  const at::NoGradGuard no_grad;
  auto& parameter = parameters_[p];
  at::Tensor gradient = std::move(parameter.tensor.mutable_grad());
  parameter.tensor.mutable_grad() = at::Tensor();
  gradient = gradient.detach();
  if (gradient.is_sparse()) gradient = gradient.to_dense();
  gradient = gradient.to(working_type_).contiguous();
  if (parameter.taken.defined())  // backward reaches the parameter more than once, as recomputed parts do
    parameter.taken.add_(gradient);
  else
    parameter.taken = readable_by_peers(gradient, p);
  if (!parameter.arrived) ++arrivals;
  parameter.arrived = true;
}

void Unit::post() {
  if (round_ > 0) exchange_->wait_finished(round_, name_, 0);  // the offers of the round before may still be read
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
  for (int r = 0; r < layout_.ranks(); ++r)
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
    for (int r = 0; r < layout_.ranks(); ++r) {
      const auto* gradient = static_cast<const std::byte*>(exchange_->gradient(Rank(r), p));
      if (gradient == nullptr) continue;
      sources.push_back(gradient + parameter.owned.begin * layout_.element_size());
      if (r != communicator_.rank().value) reduced_bytes += parameter.owned.size() * layout_.element_size();
    }
    if (sources.empty()) {  // no rank used it: it has no gradient, which is not the same as zero
      if (consumer != nullptr && parameter.shard.grad().defined()) consume_sum(p, *consumer, step);  // of earlier rounds
      continue;
    }
    parameter.has_gradient = true;
    reduce_parameter(p, {sources, element_of(working_type_)}, scale, consumer, step);
  }
  if (!all_reduced()) return exchange_->finish(round_);
  for (ParameterIndex p = 0; p < parameters_.size(); ++p)
    exchange_->offer_sum(p, parameters_[p].sum.defined() ? parameters_[p].sum.const_data_ptr() : nullptr);
  exchange_->post_sums(round_);
}

void Unit::reduce_parameter(ParameterIndex p, const SumSources& from, double scale, GradientConsumer* consumer,
                            int64_t step) {
  auto& parameter = parameters_[p];
  const bool accumulate = parameter.shard.grad().defined();
  if (!gradients_sharded()) prepare_sum(p, accumulate);
  const Interval owned = parameter.owned;
  // Ranks with a replicated optimizer need each other's sums too. All must use the same: where sums are rounded, the rounded
  // one.
  const bool leave_sum = all_reduced() && layout_.ranks() > 1;
  if (consumer != nullptr && !accumulate && !(leave_sum && gradient_type_ != master_type_)) {
    if (!owned.empty()) parameter.squares = consumer->consume(piece_of(p, owned, from, scale, step, leave_sum)).squares;
    return;
  }
  if (!owned.empty())
    parameter.squares =
        sum_sources(from, scale, accumulate, reduced_at(p, owned.begin), element_of(gradient_type_), owned.size()).squares;
  if (consumer != nullptr) consume_sum(p, *consumer, step);
  if (consumer == nullptr && !all_reduced()) show_gradient(p);
}

void Unit::consume_sum(ParameterIndex p, GradientConsumer& consumer, int64_t step) {
  const Interval owned = parameters_[p].owned;
  if (owned.empty()) return;
  const void* sum = reduced_at(p, owned.begin);
  consumer.consume(piece_of(p, owned, {{&sum, 1}, element_of(gradient_type_)}, 1.0, step));
}

void Unit::prepare_sum(ParameterIndex p, bool accumulate) {
  auto& parameter = parameters_[p];
  if (accumulate && parameter.sum.defined()) return;
  // The sum of the owned part takes the place of this rank's own gradient, which nobody else reads there.
  parameter.sum = parameter.lent;
  if (parameter.sum.defined()) return;
  parameter.sum = at::from_blob(staging_area_.get() + layout_.offset(p).value * layout_.element_size(),
                                parameter.tensor.sizes(), at::TensorOptions().dtype(working_type_));
  staged_ = std::max(staged_, staging_ += Bytes(static_cast<int64_t>(parameter.sum.nbytes())));
}

std::byte* Unit::reduced_at(ParameterIndex p, int64_t element) const {
  if (!gradients_sharded()) return static_cast<std::byte*>(parameters_[p].sum.data_ptr()) + element * gradient_size_;
  const int64_t first = layout_.chunk_of(communicator_.rank()).begin;
  return gradient_.get() + (layout_.offset(p).value + element - first) * gradient_size_;
}

GradientPiece Unit::piece_of(ParameterIndex p, Interval part, const SumSources& from, double scale, int64_t step,
                             bool leave_sum) const {
  const int64_t first = layout_.offset(p).value + part.begin;
  const bool separate = master_.data() != nullptr;
  return {.unit = index_,
          .parameter = static_cast<uint32_t>(p),
          .state_begin = first - updated_.begin,
          .count = part.size(),
          .step = step,
          .gradients = from,
          .scale = scale,
          .master = master_at(first),
          .master_element = element_of(master_type_),
          .working = separate ? working_at(first) : nullptr,
          .working_element = element_of(working_type_),
          .sum = leave_sum ? reduced_at(p, part.begin) : nullptr,
          .sum_element = element_of(gradient_type_)};
}

void Unit::show_gradient(ParameterIndex p) {
  const at::NoGradGuard no_grad;
  auto& parameter = parameters_[p];
  if (parameter.shard.grad().defined() && gradient_type_ == master_type_) return;  // it already is this memory
  at::Tensor gradient;
  if (gradients_sharded())
    gradient = at::from_blob(parameter.owned.empty() ? gradient_.get() : reduced_at(p, parameter.owned.begin),
                             {parameter.owned.size()}, at::TensorOptions().dtype(gradient_type_));
  else
    gradient = parameter.sum.view(-1).narrow(0, parameter.updated.begin, parameter.updated.size());
  // Detached: torch::optim's zero_grad refuses gradients that are views for autograd.
  parameter.shard.mutable_grad() = gradient.view(parameter.shard.sizes()).to(master_type_).detach();
}

std::chrono::nanoseconds Unit::gather_sums(GradientConsumer* consumer, double scale, int64_t step) {
  if (!all_reduced()) return {};
  const auto spent = exchange_->wait_sums(round_, name_, step);
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    if (!parameters_[p].has_gradient) continue;
    for (int r = 0; r < layout_.ranks(); ++r) {
      const Interval part = layout_.owned(p, Rank(r));
      if (r == communicator_.rank().value || part.empty()) continue;
      const void* sum = static_cast<const std::byte*>(exchange_->sum(Rank(r), p)) + part.begin * gradient_size_;
      reduced_bytes += part.size() * gradient_size_;
      if (consumer != nullptr)
        consumer->consume(piece_of(p, part, {{&sum, 1}, element_of(gradient_type_)}, scale, step));
      else
        std::memcpy(reduced_at(p, part.begin), sum, static_cast<size_t>(part.size() * gradient_size_));
    }
    if (consumer == nullptr) show_gradient(p);
  }
  exchange_->finish(round_);
  return spent;
}

void Unit::consume_reduced(GradientConsumer& consumer, double scale, int64_t step) {
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    const Interval part = parameters_[p].updated;
    if (!parameters_[p].has_gradient || part.empty()) continue;
    const void* sum = reduced_at(p, part.begin);
    consumer.consume(piece_of(p, part, {{&sum, 1}, element_of(gradient_type_)}, scale, step));
  }
}

int64_t Unit::reduced_offset(ParameterIndex p) const {
  if (!parameters_[p].has_gradient && !parameters_[p].shard.grad().defined()) return 0;
  return communicator_.offset_of(reduced_at(p, parameters_[p].owned.begin));
}

at::Tensor Unit::read_gradient(ParameterIndex p, const std::vector<int64_t>& offsets) const {
  if (offsets[static_cast<size_t>(communicator_.rank().value)] == 0) return {};
  at::Tensor whole = at::empty(parameters_[p].tensor.sizes(), at::TensorOptions().dtype(gradient_type_));
  for (int r = 0; r < layout_.ranks(); ++r) {
    const Interval part = layout_.owned(p, Rank(r));
    if (part.empty()) continue;
    communicator_.read_peer(Rank(r), offsets[static_cast<size_t>(r)],
                            static_cast<std::byte*>(whole.data_ptr()) + part.begin * gradient_size_,
                            Bytes(part.size() * gradient_size_));
  }
  return whole;
}

bool Unit::take_back() {
  if (round_ == 0) return true;
  for (int r = 0; r < layout_.ranks(); ++r)
    if (!exchange_->finished(Rank(r), round_)) return false;
  for (auto& parameter : parameters_) parameter.lent = at::Tensor();
  lent = Bytes{};
  return true;
}

bool Unit::any_gradient() const {
  for (const auto& parameter : parameters_)
    if (parameter.has_gradient) return true;
  return false;
}

void Unit::forget_gradients() {
  for (auto& parameter : parameters_) {
    parameter.has_gradient = false;
    parameter.squares = 0;
    if (!parameter.shard.grad().defined()) parameter.sum = at::Tensor();
  }
  shard_written = false;
  updated = false;
}

}  // namespace tessera
