#include "tessera/optim/adamw.h"

#include <ATen/ops/from_blob.h>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/hash.h"
#include "tessera/optim/adamw_kernel.h"
#include "tessera/storage/memory.h"

namespace tessera {
namespace {

void check(bool good, const char* name, double value, const char* wanted) {
  if (!good) throw ConfigError(text("AdamW's ", name, " must be ", wanted, ", but is ", value));
}

}  // namespace

AdamW::AdamW(const Sharded& sharded, const AdamWOptions& options)
    : engine_(sharded.shared_engine()), options_(options), fused_(options.fused_reduction) {
  check(options.lr >= 0, "lr", options.lr, "0 or more");
  check(options.beta1 >= 0 && options.beta1 < 1, "beta1", options.beta1, "in [0, 1)");
  check(options.beta2 >= 0 && options.beta2 < 1, "beta2", options.beta2, "in [0, 1)");
  check(options.eps >= 0, "eps", options.eps, "0 or more");
  check(options.weight_decay >= 0, "weight_decay", options.weight_decay, "0 or more");
  int64_t wanted = 0;
  for (const auto& unit : engine_->units()) {
    UnitState state;
    state.elements = trainable_type(unit->working_type()) ? unit->updated_elements() : 0;
    state.type = options.moments.value_or(master_type(unit->working_type()));
    if (state.elements > 0 && state.type != master_type(unit->working_type()) && state.type != c10::ScalarType::BFloat16)
      throw ConfigError(text("AdamW's moments can be kept in the type of the master parameters, which is ",
                             c10::toString(master_type(unit->working_type())), " in unit '", unit->name(),
                             "', or in BFloat16, but not in ", c10::toString(state.type)));
    state.element_size = static_cast<int64_t>(c10::elementSize(state.type));
    state.steps.resize(unit->parameters().size());
    wanted += 2 * state.elements * state.element_size;
    units_.push_back(std::move(state));
  }
  require_memory(Bytes(wanted * engine_->communicator().size()), "AdamW's moments on all ranks of this host");
  engine_->attach(this);
}

std::byte* AdamW::UnitState::bytes() {
  if (moments.data() == nullptr) moments = PrivateBuffer(Bytes(2 * elements * element_size), "AdamW's moments");
  return moments.data();
}

AdamW::Moments AdamW::moments(uint32_t index, ParameterIndex p) {
  UnitState& state = units_[index];
  const auto& runs = engine_->units()[index]->parameters()[p].updated;
  const int64_t count = state.elements > 0 ? count_of(runs) : 0;
  std::byte* first = state.bytes() + (count > 0 ? runs.front().local * state.element_size : 0);
  const auto wrap = [&](std::byte* at) { return at::from_blob(at, {count}, at::TensorOptions().dtype(state.type)); };
  return {wrap(first), wrap(first + state.elements * state.element_size), state.steps[p].first};
}

uint64_t AdamW::settings() const {
  const double values[] = {options_.lr, options_.beta1, options_.beta2, options_.eps, options_.weight_decay};
  return hash_of_bytes(values, sizeof values);
}

AdamW::~AdamW() { engine_->attach(nullptr); }

SumResult AdamW::consume(const GradientPiece& piece) {
  UnitState& unit = units_[piece.unit];
  auto& [updates, last_step] = unit.steps[piece.parameter];
  if (last_step != piece.step) {
    last_step = piece.step;
    ++updates;
  }
  std::byte* first = unit.bytes() + piece.state_begin * unit.element_size;
  const AdamWStep step{.lr = options_.lr,
                       .beta1 = options_.beta1,
                       .beta2 = options_.beta2,
                       .eps = options_.eps,
                       .weight_decay = options_.weight_decay,
                       .step = updates,
                       .gradient_scale = piece.scale};
  const AdamWState state{.master = piece.master,
                         .exp_avg = first,
                         .exp_avg_sq = first + unit.elements * unit.element_size,
                         .element = piece.master_element,
                         .moment_element = element_of(unit.type),
                         .working = piece.working,
                         .working_element = piece.working_element,
                         .gradient_sum = piece.sum,
                         .gradient_element = piece.sum_element};
  return adamw_update(piece.gradients, step, state, piece.count);
}

}  // namespace tessera
