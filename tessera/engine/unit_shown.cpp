// The part of Unit for what the shards' .grad holds. Once a reduced gradient is shown there, that is what counts: users may
// change, replace or drop it, as with torch's optimizers. The memory that gradients are reduced into is behind it: .grad is
// a view of it where types and places allow, else a copy.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cmath>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/unit.h"

namespace tessera {

// This rank's part of the reduced gradient, in the shape of the shard.
at::Tensor Unit::reduced_shard(ParameterIndex p) const {
  const auto& parameter = parameters_[p];
  const Run first = parameter.updated.empty() ? Run{0, 0, 0} : parameter.updated.front();
  if (!gradients_sharded() && parameter.updated.size() < 2)
    return parameter.sum.view(-1).narrow(0, first.begin, first.count).view(parameter.shard.sizes());
  if (gradients_sharded())
    return at::from_blob(reduced_at(p, first), parameter.shard.sizes(), at::TensorOptions().dtype(gradient_type_));
  at::Tensor packed = at::empty(parameter.shard.sizes(), at::TensorOptions().dtype(gradient_type_));
  auto* to = static_cast<std::byte*>(packed.data_ptr());
  for (const Run& run : parameter.updated)
    std::memcpy(to + (run.local - first.local) * gradient_size_, reduced_at(p, run),
                static_cast<size_t>(run.count * gradient_size_));
  return packed;
}

bool Unit::shows_reduced(ParameterIndex p) const {
  const auto& parameter = parameters_[p];
  const at::Tensor& shown = parameter.gradient();
  if (!shown.defined() || shown.layout() != at::kStrided || shown.scalar_type() != gradient_type_ ||
      shown.sizes() != parameter.shard.sizes() || !shown.is_contiguous())
    return false;
  if (shown.numel() == 0) return true;
  return (gradients_sharded() || parameter.updated.size() < 2) && reduced(p) != nullptr &&
         shown.const_data_ptr() == reduced_at(p, parameter.updated.front());
}

void Unit::note_shown(ParameterIndex p) {
  auto& parameter = parameters_[p];
  const at::Tensor& shown = parameter.gradient();
  parameter.shown = ShownGradient(shown.getIntrusivePtr());
  parameter.shown_version = shown.defined() && !shown.is_inference() ? static_cast<int64_t>(shown._version()) : 0;
}

bool Unit::changed_since_shown(ParameterIndex p) const {
  const auto& parameter = parameters_[p];
  const at::Tensor& shown = parameter.gradient();
  if (!shown.defined()) return parameter.squares != 0;  // dropped
  if (shown.is_inference()) return true;                // has no versions
  return parameter.shown.lock().get() != shown.unsafeGetTensorImpl() ||
         parameter.shown_version != static_cast<int64_t>(shown._version());
}

void Unit::show_gradient(ParameterIndex p) {
  const at::NoGradGuard no_grad;
  auto& parameter = parameters_[p];
  if (adds_up_where_shown() && parameter.gradient().defined()) return add_to_shown(p);
  if (!shows_reduced(p) || adds_up_where_shown()) {
    // Detached: torch::optim's zero_grad refuses gradients that are views for autograd.
    at::Tensor gradient = reduced_shard(p).to(master_type_).detach();
    if (kept_scale_ != 1) gradient.mul_(1 / kept_scale_);  // a copy: what is kept scaled is fp16
    parameter.shard.mutable_grad() = gradient;
  }
  note_shown(p);
}

void Unit::add_to_shown(ParameterIndex p) {
  at::Tensor& shown = parameters_[p].shard.mutable_grad();
  const at::Tensor before = shown_gradient(p);
  const bool in_place = shown.scalar_type() == master_type_ && !shown.is_inference();
  const at::Tensor more = reduced_shard(p).to(master_type_);
  if (in_place)
    shown.add_(more, 1 / kept_scale_);
  else
    shown = before.add(more, 1 / kept_scale_);
  measure(p);
}

void Unit::show_gradient_anew(ParameterIndex p) {
  parameters_[p].shard.mutable_grad() = at::Tensor();
  show_gradient(p);
}

at::Tensor Unit::shown_gradient(ParameterIndex p) const {
  const at::NoGradGuard no_grad;
  const auto& parameter = parameters_[p];
  const at::Tensor& shown = parameter.gradient();
  if (!shown.defined()) return shown;
  if (shown.sizes() != parameter.shard.sizes() || shown.layout() != at::kStrided || !shown.is_floating_point() ||
      !shown.is_cpu() || !trainable_type(working_type_))
    throw GuardError(text("the .grad of this rank's part of parameter '", parameter.name, "' (unit '", name_, "', rank ",
                          communicator_.rank().value, ") was replaced by ", c10::toString(shown.scalar_type()), " ",
                          c10::str(shown.sizes()), ", but must be a dense ", c10::toString(master_type_), " ",
                          c10::str(parameter.shard.sizes())));
  return shown.detach().to(master_type_).contiguous();
}

void Unit::write_reduced(ParameterIndex p, const at::Tensor& values) {
  const at::Tensor flat = values.view(-1) * kept_scale_;
  int64_t at = 0;
  for (const Run& run : parameters_[p].updated) {
    at::from_blob(reduced_at(p, run), {run.count}, at::TensorOptions().dtype(gradient_type_))
        .copy_(flat.narrow(0, at, run.count));
    at += run.count;
  }
}

void Unit::refuse_change_of_partial(ParameterIndex p, int64_t step) const {
  if (!parameters_[p].partial || !parameters_[p].gradient().defined() || !changed_since_shown(p)) return;
  throw GuardError(text("the .grad of parameter '", parameters_[p].name, "' (unit '", name_, "', rank ",
                        communicator_.rank().value, ") was changed between micro-batches of step ", step,
                        ", while its gradients wait to be summed over the ranks that share this part; change it before the "
                        "first or after the last of them"));
}

void Unit::take_in_shown(ParameterIndex p, int64_t step) {
  auto& parameter = parameters_[p];
  if (!parameter.gradient().defined()) return;
  refuse_change_of_partial(p, step);
  if (parameter.partial || adds_up_where_shown()) return;
  if (!shows_reduced(p)) {
    const at::NoGradGuard no_grad;
    const at::Tensor shown = shown_gradient(p);
    if (!gradients_sharded() && !parameter.sum.defined())
      parameter.sum = at::from_blob(sums_area_.get() + layout_.offset(p).value * taken_size_, layout_.shape(p),
                                    at::TensorOptions().dtype(taken_type_));
    write_reduced(p, shown);
  }
  note_shown(p);
}

template <class Action>
void Unit::for_each_shown_sum(ParameterIndex p, const Action& action) const {
  const at::Tensor shown = shown_gradient(p);
  if (!shown.defined()) return;
  const auto& parameter = parameters_[p];
  const int64_t first = parameter.updated.empty() ? 0 : parameter.updated.front().local;
  for (const Run& run : parameter.summed)
    if (run.count > 0) action(shown.view(-1).narrow(0, run.local - first, run.count).to(at::kDouble));
}

void Unit::measure(ParameterIndex p) {
  auto& parameter = parameters_[p];
  parameter.squares = 0;
  for_each_shown_sum(p, [&](const at::Tensor& part) { parameter.squares += part.pow(2).sum().item<double>(); });
  if (parameter.gradient().defined()) note_shown(p);
}

double Unit::power_of_gradient(ParameterIndex p, double exponent) const {
  if (exponent == 2) return parameters_[p].squares;
  const at::NoGradGuard no_grad;
  double sum = 0;
  for_each_shown_sum(p, [&](const at::Tensor& part) {
    if (!std::isinf(exponent))
      sum += part.abs().pow(exponent).sum().item<double>();
    else if (const double largest = part.abs().max().item<double>(); !(largest <= sum))
      sum = largest;  // NaN stays
  });
  return sum;
}

void Unit::measure_changed() {
  const at::NoGradGuard no_grad;
  for (ParameterIndex p = 0; p < parameters_.size(); ++p)
    if (changed_since_shown(p)) measure(p);
}

void Unit::refuse_changed(int64_t step) const {
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    if (!parameters_[p].gradient().defined() || (parameters_[p].has_gradient && !changed_since_shown(p))) continue;
    throw GuardError(text("the .grad of parameter '", parameters_[p].name, "' (unit '", name_, "', rank ",
                          communicator_.rank().value, ") was set or changed after backward (step ", step,
                          "), but with fused_reduction its gradients had been used then; construct the optimizer without "
                          "fused_reduction"));
  }
}

void Unit::write_gradient(ParameterIndex p, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  auto& parameter = parameters_[p];
  if (!values.defined()) {
    parameter.shard.mutable_grad() = at::Tensor();
    parameter.has_gradient = false;
    parameter.squares = 0;
    parameter.sum = at::Tensor();
    return;
  }
  if (!gradients_sharded()) prepare_sum(p, parameter.has_gradient);
  write_reduced(p, values.detach().to(master_type_).contiguous());
  parameter.has_gradient = true;
  show_gradient_anew(p);
  measure(p);
}

void Unit::clamp_gradients(double limit) {
  const at::NoGradGuard no_grad;
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    if (!parameters_[p].gradient().defined()) continue;
    parameters_[p].shard.mutable_grad().clamp_(-limit, limit);
    measure(p);
  }
}

void Unit::scale_gradients(double factor) {
  const at::NoGradGuard no_grad;
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    auto& parameter = parameters_[p];
    if (!parameter.gradient().defined()) continue;
    parameter.shard.mutable_grad().mul_(factor);
    parameter.squares *= factor * factor;
    note_shown(p);
  }
}

void Unit::change_gradient(ParameterIndex p, const ReducedGradientHook& change) {
  auto& parameter = parameters_[p];
  if (!parameter.gradient().defined()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor before = parameter.gradient().detach();
  at::Tensor part = before;
  change(parameter.name, part);
  if (!part.defined() || part.sizes() != before.sizes())
    throw ConfigError(text("on_reduced_gradient: the function replaced the gradient of '", parameter.name, "', which is ",
                           c10::str(before.sizes()), " on this rank, by ",
                           part.defined() ? c10::str(part.sizes()) : "an undefined tensor", "; keep its shape"));
  if (!part.is_same(before)) before.copy_(part);
  measure(p);
}

void Unit::consume_gradients(GradientConsumer& consumer, int64_t step) {
  for (ParameterIndex p = 0; p < parameters_.size(); ++p)
    if (parameters_[p].gradient().defined()) consume_shown(p, consumer, step);
}

void Unit::consume_shown(ParameterIndex p, GradientConsumer& consumer, int64_t step) {
  const at::Tensor shown = shown_gradient(p);
  const auto* at = static_cast<const std::byte*>(shown.const_data_ptr());
  for (const Run& run : parameters_[p].updated) {
    const void* gradient = at + (run.local - parameters_[p].updated.front().local) * master_size_;
    consumer.consume(piece_of(p, run, {{&gradient, 1}, element_of(master_type_)}, 1.0, step));
  }
}

}  // namespace tessera
