#include "tessera/engine/gradient_hook.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/pattern.h"
#include "tessera/base/text.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/gradient_watch.h"

namespace tessera {

namespace {

// The tensor's hook, or nullptr. A tensor that never required a gradient has no place for one.
torch::autograd::PostAccumulateGradHook* hook_of(const at::Tensor& parameter) {
  namespace impl = torch::autograd::impl;
  return impl::get_autograd_meta(parameter) == nullptr ? nullptr : impl::post_acc_grad_hooks(parameter).get();
}

}  // namespace

void GradientHook::put(Engine& engine, const at::Tensor& parameter, uint32_t unit, ParameterIndex index) {
  auto* there = hook_of(parameter);
  if (const auto* ours = dynamic_cast<const GradientHook*>(there); ours != nullptr && ours->engine_ == &engine) return;
  auto hook = std::make_unique<GradientHook>();
  hook->engine_ = &engine;
  hook->unit_ = unit;
  hook->index_ = index;
  if (there != nullptr) hook->own_ = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
}

void GradientHook::take_away(Engine& engine, const at::Tensor& parameter) {
  auto* ours = dynamic_cast<GradientHook*>(hook_of(parameter));
  if (ours != nullptr && ours->engine_ == &engine)
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(ours->own_));
}

void GradientHook::operator()(const at::Tensor& parameter) {
  if (own_) (*own_)(parameter);
  if (parameter.grad().defined()) engine_->on_gradient(unit_, index_);  // else it was taken away
}

// ---- hooks of reduced gradients ------------------------------------------------------------------------------------

void Engine::watch_gradients() {
  for (uint32_t u = 0; u < units_.size(); ++u) {
    if (!trainable_type(units_[u]->working_type())) continue;
    for (ParameterIndex p = 0; p < units_[u]->parameters().size(); ++p)
      GradientHook::put(*this, units_[u]->parameters()[p].tensor, u, p);
  }
}

void Engine::watch_missing_gradients() {
  for (const auto& unit : units_)
    for (auto& parameter : unit->parameters())
      watch_missing_gradient(parameter.shard, [self = self_, &parameter] {
        if (*self != nullptr) (*self)->on_missing_gradient(parameter);
      });
}

// An optimizer of torch's that finds no gradient does nothing else: only by this look is a step known that this rank took
// without any, and in which it did not take part.
void Engine::on_missing_gradient(UnitParameter& parameter) {
  if (consumer_ != nullptr || phase_ == Phase::backward || (rounds_ > 0 && phase_ != Phase::stepping)) return;
  for (const auto& unit : units_)
    for (const auto& each : unit->parameters())
      if (each.gradient().defined()) return;
  ++parameter.looks;
}

int32_t Engine::take_looks() {
  int32_t most = 0;
  for (const auto& unit : units_)
    for (auto& parameter : unit->parameters()) most = std::max(most, std::exchange(parameter.looks, 0));
  return most;
}

void Engine::refuse_hooks_with(const GradientConsumer* consumer) const {
  if (hooks_.empty() || consumer == nullptr || !consumer->fuses_reduction()) return;
  throw ConfigError(
      "on_reduced_gradient: with fused_reduction gradients are used while they are summed, so nothing sees them before the "
      "update; construct the optimizer without fused_reduction");
}

void Engine::on_reduced_gradient(const std::string& pattern, ReducedGradientHook hook) {
  if (!hook) throw ConfigError(text("on_reduced_gradient('", pattern, "') was given no function"));
  HookedParameters hooked{{}, std::move(hook)};
  for (uint32_t u = 0; u < units_.size(); ++u)
    for (ParameterIndex p = 0; p < units_[u]->parameters().size(); ++p)
      if (matches(pattern, units_[u]->parameters()[p].name)) hooked.parameters.push_back({u, p});
  if (hooked.parameters.empty())
    throw ConfigError(text("on_reduced_gradient: the pattern '", pattern, "' matches no parameter of the sharded model"));
  hooks_.push_back(std::move(hooked));
  try {
    refuse_hooks_with(consumer_);
  } catch (...) {
    hooks_.pop_back();
    throw;
  }
}

void Engine::call_gradient_hooks() {
  if (hooks_.empty() || accumulating_ > 0 || std::exchange(hooks_called_, true)) return;
  for (const auto& hooked : hooks_)
    for (const auto& [u, p] : hooked.parameters) units_[u]->change_gradient(p, hooked.hook);
}

// Before more gradients are added to those of this step.
void Engine::refuse_more_gradients() {
  if (!hooks_called_) return;
  bool dropped = consumer_ == nullptr;  // with torch's zero_grad, of which nobody tells
  for (const auto& unit : units_)
    for (const auto& parameter : unit->parameters()) dropped &= !parameter.gradient().defined();
  if (!dropped)
    throw GuardError(
        text("step ", step_,
             ": the functions given to on_reduced_gradient have seen this step's gradients, since their norm was "
             "taken or they were clipped or read, and now a backward would add to them; do that after the last "
             "backward of the step, or drop the gradients (set to none) first"));
  hooks_called_ = false;
}

}  // namespace tessera
