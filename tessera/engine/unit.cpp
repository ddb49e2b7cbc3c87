#include "tessera/engine/unit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "tessera/base/check.h"
#include "tessera/base/error.h"
#include "tessera/base/pattern.h"
#include "tessera/base/text.h"
#include "tessera/engine/hash.h"
#include "tessera/engine/real_pairs.h"

namespace tessera {
namespace {

at::Tensor wrap(void* data, int64_t elements, c10::ScalarType type) {
  return at::from_blob(data, {elements}, at::TensorOptions().dtype(type));
}

std::vector<NamedShape> shapes_of(const UnitSpec& spec) {
  std::vector<NamedShape> shapes;
  for (const auto& parameter : spec.parameters) {
    shapes.push_back({parameter.name, parameter.tensor.sizes().vec()});
    if (parameter.tensor.is_complex()) shapes.back().shape.push_back(2);
  }
  return shapes;
}

bool is_meant_by(const std::string& pattern, const std::string& name, const std::vector<std::string>& asked_for) {
  return matches(pattern, name) ||
         std::any_of(asked_for.begin(), asked_for.end(), [&](const auto& asked) { return matches(pattern, asked); });
}

std::string guard_message(const std::string& unit) {
  return text("the parameters of unit '", unit,
              "' are sharded at this moment, so their values can't be read here. Use them in operators that "
              "go through the dispatcher (these gather the unit), or read them with Sharded::full_parameters()");
}

}  // namespace

bool UnitSpec::is_meant_by(const std::string& pattern) const { return tessera::is_meant_by(pattern, name, asked_for); }
bool Unit::is_meant_by(const std::string& pattern) const { return tessera::is_meant_by(pattern, name_, asked_for_); }

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& each : named) tensors.push_back(each.tensor);
  return tensors;
}

Unit::Unit(UnitSpec spec, uint32_t index, const Precision& precision, Communicator& communicator, AccessHandler& handler)
    : name_(spec.name),
      asked_for_(spec.asked_for),
      index_(index),
      placements_(spec.rule.placements),
      division_(spec.rule.division),
      communicator_(communicator),
      observed_{&handler, Observed::Kind::unit, index},
      kept_after_forward_(spec.kept_after_forward) {
  const c10::ScalarType own = real_type(spec.parameters.front().tensor.scalar_type());
  complex_ = spec.parameters.front().tensor.is_complex();
  const bool floating = trainable_type(own);
  working_type_ = floating ? precision.working.value_or(own) : own;
  master_type_ = floating ? master_type(working_type_) : own;
  gradient_type_ = floating ? precision.gradient.value_or(working_type_) : own;
  if (gradient_type_ == c10::ScalarType::Double && master_type_ != gradient_type_)
    throw ConfigError(text("precision.gradient is Double, but the master parameters of unit '", name_, "' (parameter '",
                           spec.parameters.front().name, "') are ", c10::toString(master_type_), ", which is narrower"));
  if (complex_ && c10::elementSize(working_type_) < 4)
    throw ConfigError(text("parameter '", spec.parameters.front().name, "' is complex, and there are no complex numbers of ",
                           c10::toString(working_type_),
                           "; leave precision.working unset, or set it to float32 or float64"));
  taken_type_ = gradients_sharded() ? working_type_ : gradient_type_;
  master_size_ = static_cast<int64_t>(c10::elementSize(master_type_));
  gradient_size_ = static_cast<int64_t>(c10::elementSize(gradient_type_));
  taken_size_ = static_cast<int64_t>(c10::elementSize(taken_type_));
  layout_ =
      Layout(shapes_of(spec), spec.rule.layout, communicator.size(), static_cast<int64_t>(c10::elementSize(working_type_)));
  state_size_ = layout_.shard(division_.optimizer_part(communicator.rank()), division_.optimizer_parts()).value;
  parameters_.resize(spec.parameters.size());
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    parameters_[p].summed = division_.summed(layout_, p, communicator.rank());
    parameters_[p].updated = division_.updated(layout_, p, communicator.rank());
  }
  lay_out(spec);
  write_initial_values(spec);
  make_shards(spec);
}

WindowPlan Unit::window_plan() const {
  const Rank me = communicator_.rank();
  WindowPlan plan{.copies = division_.copies(), .copy_of = {}, .fetches = {}, .first = division_.parameter_part(me)};
  for (int r = 0; r < division_.ranks(); ++r) plan.copy_of.push_back(division_.copy(Rank(r)));
  if (!division_.copies_exchange()) return plan;
  plan.fetches.resize(static_cast<size_t>(division_.parameter_parts()));
  for (int r = 0; r < division_.ranks(); ++r) {
    const Rank owner(r);
    if (division_.copy(owner) == division_.copy(me)) continue;
    auto& pieces = plan.fetches[static_cast<size_t>(division_.parameter_part(owner))];
    for (ParameterIndex p = 0; p < parameters_.size(); ++p)
      for (const Run& run : division_.updated(layout_, p, owner))
        pieces.push_back(
            {owner, (layout_.offset(p).value + run.begin) * layout_.element_size(), run.count * layout_.element_size()});
  }
  return plan;
}

void Unit::lay_out(UnitSpec& spec) {
  const Bytes whole = size_of(layout_.total(), layout_.element_size());
  if (placements_.optimizer == Placement::replicated) {
    replica_ = PrivateBuffer(whole, "parameters");
    working_ = replica_.data();
  } else {
    window_ = communicator_.parameter_window(name_, whole, window_plan());
    working_ = window_->data();
  }
  bool scattered = false;
  for (const auto& parameter : parameters_) scattered |= parameter.updated.size() > 1;
  if (scattered || master_type_ != working_type_)
    master_ = PrivateBuffer(Bytes(state_size_ * master_size_), "master parameters");
  exchange_ = communicator_.gradient_exchange(name_, spec.parameters.size());
  const Bytes taken = size_of(layout_.total(), taken_size_);
  staging_area_ = communicator_.peer_readable(name_ + " staging", taken);
  if (!gradients_sharded()) sums_area_ = communicator_.peer_readable(name_ + " sums", taken);
  if (gradients_sharded()) {
    const Numel largest = layout_.largest_shard(division_.optimizer_parts());
    gradient_ = communicator_.peer_readable(name_ + " gradient shard", Bytes(largest.value * gradient_size_));
  }
  storage_ = std::make_unique<GuardedStorage>(whole, at::kCPU, &observed_, guard_message(name_));
}

void Unit::write_initial_values(const UnitSpec& spec) {
  for (ParameterIndex p = 0; p < spec.parameters.size(); ++p) write_values(p, spec.parameters[p].tensor);
  publish_expected_epoch();
}

void Unit::write_values(ParameterIndex p, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const at::Tensor converted = complex_ && !values.is_complex() ? values.detach().to(module_type()) : values.detach();
  const at::Tensor flat = real_pairs(converted).contiguous().view(-1);
  // Of a copy that several ranks share, each writes its part.
  for (const Run& run : division_.held(layout_, p, communicator_.rank()))
    wrap(working_at(p, run), run.count, working_type_).copy_(flat.narrow(0, run.begin, run.count));
  if (master_.data() == nullptr) return;
  for (const Run& run : parameters_[p].updated)
    wrap(master_at(p, run), run.count, master_type_).copy_(flat.narrow(0, run.begin, run.count));
}

void Unit::write_part(ParameterIndex p, const at::Tensor& values, int64_t first) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = values.detach().contiguous().view(-1);
  const Interval given{first, first + flat.numel()};
  int64_t at = 0;  // of the run in the shard
  for (const Run& run : parameters_[p].updated) {
    const Interval common = intersect({at, at + run.count}, given);
    const int64_t skipped = common.begin - at;
    at += run.count;
    if (common.empty()) continue;
    const Run piece{run.begin + skipped, common.size(), run.local + skipped};
    const at::Tensor part = flat.narrow(0, common.begin - first, common.size());
    wrap(master_at(p, piece), piece.count, master_type_).copy_(part);
    if (master_.data() != nullptr) wrap(working_at(p, piece), piece.count, working_type_).copy_(part);
  }
}

bool Unit::replaced(ParameterIndex p) const {
  const at::Tensor& tensor = parameters_[p].tensor;
  const auto& shape = layout_.shape(p);
  return GuardedStorage::owner_of(tensor) != &observed_ || !tensor.is_contiguous() ||
         tensor.sizes() != c10::IntArrayRef(shape.data(), shape.size() - (complex_ ? 1 : 0)) ||
         tensor.storage_offset() != layout_.offset(p).value / (complex_ ? 2 : 1);
}

void Unit::take_back_tensor(ParameterIndex p) {
  auto& tensor = parameters_[p].tensor;
  tensor.set_data(storage_->view(tensor.sizes(), layout_.offset(p).value / (complex_ ? 2 : 1), module_type()));
}

c10::ScalarType Unit::module_type() const { return complex_ ? c10::toComplexType(working_type_) : working_type_; }

std::vector<int64_t> Unit::shape(ParameterIndex p) const {
  auto shape = layout_.shape(p);
  if (complex_) shape.pop_back();
  return shape;
}

std::vector<uint64_t> Unit::hashes() const {
  const std::byte* first = edit_.data() != nullptr ? edit_.data() : working_;
  std::vector<uint64_t> all;
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    const int64_t size = layout_.element_size();
    all.push_back(hash_of_bytes(first + layout_.offset(p).value * size, layout_.numel(p).value * size));
  }
  return all;
}

void Unit::make_shards(UnitSpec& spec) {
  const at::NoGradGuard no_grad;
  const int part = division_.optimizer_part(communicator_.rank()), parts = division_.optimizer_parts();
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    auto& parameter = parameters_[p];
    auto& original = spec.parameters[p];
    parameter.name = std::move(original.name);
    parameter.tensor = std::move(original.tensor);
    parameter.observed = {observed_.handler, Observed::Kind::shard, index_, static_cast<uint32_t>(p)};
    const int64_t count = count_of(parameter.updated);
    parameter.memory = std::make_unique<GuardedStorage>(Bytes(count * master_size_), at::kCPU, &parameter.observed,
                                                        text("the shard of parameter '", parameter.name, "'"));
    const Run first = parameter.updated.empty() ? Run{0, 0, 0} : parameter.updated.front();
    parameter.memory->attach(master_at(p, first));
    parameter.shard = parameter.memory->view(layout_.shard_shape(p, part, parts), 0, master_type_);
    parameter.shard.set_requires_grad(parameter.tensor.requires_grad());
    take_back_tensor(p);
  }
}

std::byte* Unit::master_at(ParameterIndex p, const Run& run) const {
  return master_.data() == nullptr ? working_at(p, run) : master_.data() + run.local * master_size_;
}

template <class Action>
void Unit::for_each_updated(const Action& action) const {
  for (ParameterIndex p = 0; p < parameters_.size(); ++p)
    for (const Run& run : parameters_[p].updated) action(p, run);
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
  if (moved) gathered_bytes += (layout_.total().value - state_size_) * layout_.element_size();
  gathered_epoch_ = epoch_;
  storage_->attach(edit_.data() != nullptr ? edit_.data() : working_);
  residency_ = Residency::resident;
  return spent;
}

void Unit::release() {
  storage_->detach();
  residency_ = Residency::sharded;
}

bool Unit::prefetch() { return !window_ || window_->prefetch(epoch_); }

void Unit::begin_edit() {
  TESSERA_CHECK(residency_ == Residency::resident, name_);
  if (edited() || layout_.total().value == 0) return;
  edit_ = PrivateBuffer(size_of(layout_.total(), layout_.element_size()), "an edit of parameters");
  std::memcpy(edit_.data(), working_, static_cast<size_t>(edit_.bytes().value));
  storage_->attach(edit_.data());
}

void Unit::keep_edit() {
  const at::NoGradGuard no_grad;
  for_each_updated([&](ParameterIndex p, const Run& run) {
    const int64_t at = (layout_.offset(p).value + run.begin) * layout_.element_size();
    const at::Tensor before = wrap(working_ + at, run.count, working_type_);
    const at::Tensor after = wrap(edit_.data() + at, run.count, working_type_);
    if (master_.data() != nullptr) {  // what was not written keeps the digits that the working type lacks
      at::Tensor master = wrap(master_at(p, run), run.count, master_type_);
      master.copy_(at::where(before.ne(after), after.to(master_type_), master));
    }
    before.copy_(after);
  });
  drop_edit();
}

void Unit::drop_edit() {
  if (residency_ == Residency::resident) release();
  edit_ = PrivateBuffer();
}

void Unit::publish_next_epoch() {
  expect_next_epoch();
  publish_expected_epoch();
}

void Unit::write_working_from_master() {
  if (master_.data() == nullptr) return;
  const at::NoGradGuard no_grad;
  for_each_updated([&](ParameterIndex p, const Run& run) {
    wrap(working_at(p, run), run.count, working_type_).copy_(wrap(master_at(p, run), run.count, master_type_));
  });
}

Bytes Unit::parameter_bytes() const {
  const Numel held = layout_.shard(division_.parameter_part(communicator_.rank()), division_.parameter_parts());
  return size_of(held, layout_.element_size());
}

Bytes Unit::gradient_bytes() const { return gradient_ && trainable() ? Bytes(state_size_ * gradient_size_) : Bytes{}; }

Bytes Unit::optimizer_bytes(int64_t moments) const {
  return master_.bytes() + Bytes(trainable() ? state_size_ * moments : 0);
}

PeakBytes Unit::peak_bytes(int64_t moments) const {
  PeakBytes bytes{.parameters = parameter_bytes().value,
                  .gradients = gradient_bytes().value,
                  .optimizer = optimizer_bytes(moments).value};
  for (ParameterIndex p = 0; p < parameters_.size(); ++p) {
    if (!parameters_[p].tensor.requires_grad()) continue;
    (gradients_sharded() ? bytes.in_flight : bytes.gradients) += layout_.numel(p).value * taken_size_;
    const auto& updated = parameters_[p].updated;
    const bool shows_a_copy = adds_up_where_shown() || (!gradients_sharded() && updated.size() > 1);
    if (shows_a_copy) bytes.gradients += count_of(updated) * master_size_;
  }
  return bytes;
}

double Unit::real_share_of_parameters() const {
  return layout_.real_share(division_.parameter_part(communicator_.rank()), division_.parameter_parts());
}

double Unit::real_share_of_shard() const {
  return layout_.real_share(division_.optimizer_part(communicator_.rank()), division_.optimizer_parts());
}

}  // namespace tessera
