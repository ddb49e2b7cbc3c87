#include "tessera/engine/unit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "tessera/base/check.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

at::Tensor wrap(void* data, int64_t elements, c10::ScalarType type) {
  return at::from_blob(data, {elements}, at::TensorOptions().dtype(type));
}

std::vector<NamedShape> shapes_of(const UnitSpec& spec) {
  std::vector<NamedShape> shapes;
  for (const auto& parameter : spec.parameters) shapes.push_back({parameter.name, parameter.tensor.sizes().vec()});
  return shapes;
}

std::string guard_message(const std::string& unit) {
  return text("the parameters of unit '", unit,
              "' are sharded at this moment, so their values can't be read here. Use them in operators that "
              "go through the dispatcher (these gather the unit), or read them with Sharded::full_parameters()");
}

}  // namespace

std::vector<at::Tensor> tensors_of(const UnitSpec& unit) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : unit.parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

Unit::Unit(UnitSpec spec, uint32_t index, const Placements& placements, const Precision& precision,
           Communicator& communicator, AccessHandler& handler)
    : name_(spec.name),
      index_(index),
      placements_(placements),
      communicator_(communicator),
      observed_{&handler, Observed::Kind::unit, index} {
  const c10::ScalarType own = spec.parameters.front().tensor.scalar_type();
  const bool floating = trainable_type(own);
  working_type_ = floating ? precision.working.value_or(own) : own;
  master_type_ = floating ? master_type(working_type_) : own;
  gradient_type_ = floating ? precision.gradient.value_or(working_type_) : own;
  if (!gradients_sharded() && gradient_type_ != working_type_)
    throw ConfigError(text("unit '", name_, "': replicated gradients stay in the type that backward makes, ",
                           c10::toString(working_type_), ", not ", c10::toString(gradient_type_),
                           "; leave precision.gradient unset, or shard the gradients (zero2, zero3)"));
  master_size_ = static_cast<int64_t>(c10::elementSize(master_type_));
  gradient_size_ = static_cast<int64_t>(c10::elementSize(gradient_type_));
  layout_ = Layout::flat(shapes_of(spec), communicator.size(), static_cast<int64_t>(c10::elementSize(working_type_)));
  updated_ = all_reduced() ? layout_.everything() : layout_.chunk_of(communicator.rank());
  lay_out(spec);
  write_initial_values(spec);
  make_shards(spec);
}

void Unit::lay_out(UnitSpec& spec) {
  const Bytes whole = size_of(layout_.total(), layout_.element_size());
  if (all_reduced()) {
    replica_ = PrivateBuffer(whole, "parameters");
    working_ = replica_.data();
  } else {
    window_ = communicator_.parameter_window(name_, whole, placements_.parameter == Placement::sharded);
    working_ = window_->data();
  }
  if (master_type_ != working_type_) master_ = PrivateBuffer(Bytes(updated_.size() * master_size_), "master parameters");
  exchange_ = communicator_.gradient_exchange(name_, spec.parameters.size());
  staging_area_ = communicator_.peer_readable(name_ + " staging", whole);
  if (gradients_sharded())
    gradient_ = communicator_.peer_readable(name_ + " gradient shard", Bytes(layout_.chunk().value * gradient_size_));
  storage_ = std::make_unique<GuardedStorage>(whole, at::kCPU, &observed_, guard_message(name_));
}

void Unit::write_initial_values(const UnitSpec& spec) {
  const at::NoGradGuard no_grad;
  const bool one_copy = window_ && placements_.parameter == Placement::sharded;
  for (ParameterIndex p = 0; p < spec.parameters.size(); ++p) {
    const at::Tensor values = spec.parameters[p].tensor.detach().contiguous().view(-1);
    // With one copy for all ranks each writes what it owns; a replica is written whole.
    const Interval part = one_copy ? layout_.owned(p, communicator_.rank()) : Interval{0, values.numel()};
    const int64_t at = layout_.offset(p).value;
    if (!part.empty())
      wrap(working_at(at + part.begin), part.size(), working_type_).copy_(values.narrow(0, part.begin, part.size()));
    const Interval updated = layout_.within(p, updated_);
    if (master_.data() != nullptr && !updated.empty())
      wrap(master_at(at + updated.begin), updated.size(), master_type_)
          .copy_(values.narrow(0, updated.begin, updated.size()));
  }
  publish_expected_epoch();
}

void Unit::make_shards(UnitSpec& spec) {
  const at::NoGradGuard no_grad;
  parameters_.resize(spec.parameters.size());
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    auto& parameter = parameters_[p];
    auto& original = spec.parameters[p];
    const Interval updated = layout_.within(p, updated_);
    const bool whole = updated.size() == layout_.numel(p).value;
    parameter.name = std::move(original.name);
    parameter.tensor = std::move(original.tensor);
    parameter.owned = layout_.owned(p, communicator_.rank());
    parameter.updated = updated;
    parameter.observed = {observed_.handler, Observed::Kind::shard, index_, static_cast<uint32_t>(p)};
    parameter.memory = std::make_unique<GuardedStorage>(Bytes(updated.size() * master_size_), at::kCPU, &parameter.observed,
                                                        text("the shard of parameter '", parameter.name, "'"));
    parameter.memory->attach(master_at(layout_.offset(p).value + updated.begin));
    parameter.shard = whole ? parameter.memory->view(parameter.tensor.sizes(), 0, master_type_)
                            : parameter.memory->view({updated.size()}, 0, master_type_);
    parameter.shard.set_requires_grad(parameter.tensor.requires_grad());
    parameter.tensor.set_data(storage_->view(parameter.tensor.sizes(), layout_.offset(p).value, working_type_));
  }
}

std::byte* Unit::master_at(int64_t element) const {
  return master_.data() == nullptr ? working_at(element) : master_.data() + (element - updated_.begin) * master_size_;
}

size_t Unit::count_trainable() const {
  size_t count = 0;
  for (const auto& parameter : parameters_) count += parameter.tensor.requires_grad() ? 1 : 0;
  return count;
}

std::chrono::nanoseconds Unit::gather(int64_t step) {
  residency_ = Residency::gathering;
  std::chrono::nanoseconds spent{};
  try {
    if (window_) spent = window_->gather(epoch_, name_, step);
  } catch (...) {
    residency_ = Residency::sharded;
    throw;
  }
  const bool moved = window_ && (placements_.parameter == Placement::sharded || gathered_epoch_ != epoch_);
  if (moved) gathered_bytes += (layout_.total() - layout_.chunk()).value * layout_.element_size();
  gathered_epoch_ = epoch_;
  storage_->attach(edit_.data() != nullptr ? edit_.data() : working_);
  residency_ = Residency::resident;
  return spent;
}

void Unit::release() {
  storage_->detach();
  residency_ = Residency::sharded;
}

void Unit::begin_edit() {
  TESSERA_CHECK(residency_ == Residency::resident, name_);
  if (edited_) return;
  edited_ = true;
  if (!window_) return;  // nobody else reads this memory
  edit_ = PrivateBuffer(window_->bytes(), "an edit of parameters");
  std::memcpy(edit_.data(), working_, static_cast<size_t>(edit_.bytes().value));
  storage_->attach(edit_.data());
}

void Unit::keep_edit() {
  const Interval chunk = layout_.chunk_of(communicator_.rank());
  if (edit_.data() != nullptr) {
    const auto bytes = static_cast<size_t>(chunk.size() * layout_.element_size());
    std::memcpy(working_at(chunk.begin), edit_.data() + chunk.begin * layout_.element_size(), bytes);
  }
  if (residency_ == Residency::resident) release();
  edit_ = PrivateBuffer();
  edited_ = false;
  write_master_from_working();
}

void Unit::publish_next_epoch() {
  expect_next_epoch();
  publish_expected_epoch();
}

void Unit::write_working_from_master() {
  if (master_.data() == nullptr) return;
  const at::NoGradGuard no_grad;
  wrap(working_at(updated_.begin), updated_.size(), working_type_)
      .copy_(wrap(master_.data(), updated_.size(), master_type_));
}

void Unit::write_master_from_working() {
  if (master_.data() == nullptr) return;
  const at::NoGradGuard no_grad;
  wrap(master_.data(), updated_.size(), master_type_)
      .copy_(wrap(working_at(updated_.begin), updated_.size(), working_type_));
}

Bytes Unit::parameter_bytes() const {
  const Numel held = placements_.parameter == Placement::sharded ? layout_.chunk() : layout_.total();
  return size_of(held, layout_.element_size());
}

Bytes Unit::gradient_bytes() const {
  return gradient_ && trainable_type(working_type_) ? Bytes(layout_.chunk().value * gradient_size_) : Bytes{};
}

}  // namespace tessera
