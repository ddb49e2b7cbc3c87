// The part of Engine for ranks that have run out of batches.
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/packed.h"
#include "tessera/base/text.h"
#include "tessera/engine/engine.h"

namespace tessera {

bool Engine::join(double samples, DivideBy divide_by) {
  if (!(samples >= 0 && std::isfinite(samples)))
    throw ConfigError(text("join needs a count of samples that is not negative, but got ", samples));
  settle();
  if (phase_ == Phase::backward)
    throw GuardError("join was called inside backward; call it before the forward of each batch");
  struct Facts {
    double samples;
    DivideBy divide_by;
  };
  const auto answers = communicator_->all_gather(text("batches of step ", step_), packed(Facts{samples, divide_by}));
  const size_t ranks = answers.size();
  took_part_.resize(ranks);
  double total = 0, active = 0;
  for (size_t r = 0; r < ranks; ++r) {
    const auto theirs = unpacked<Facts>(answers[r]);
    if (theirs.divide_by != divide_by)
      throw AgreementError(text("join in step ", step_, ": rank ", communicator_->rank().value, " and rank ", r,
                                " divide gradients by different numbers; call the same join on all ranks, with the same "
                                "DivideBy"));
    total += theirs.samples;
    active += theirs.samples > 0 ? 1 : 0;
    took_part_[r] = took_part_[r] || theirs.samples > 0;
  }
  sits_out_ = active > 0 && samples == 0;
  if (active == 0) return false;
  const auto all = static_cast<double>(ranks);
  some_sit_out_ = active < all;
  if (divide_by == DivideBy::samples) weigh(samples * all / total);
  if (divide_by == DivideBy::active_ranks) weigh(all / active);
  if (sits_out_) sit_out();
  return true;
}

// What a backward does here, without any gradient.
void Engine::sit_out() {
  refuse_unconsumed();
  refuse_replaced();
  refuse_more_gradients();
  training_pass_ = false;
  irregular_ = true;  // a step with less in it is no departure from the schedule
  release_all();
  if (reduction_pending_) make_reduced();
  ++backwards_;
  weight_ = 1.0;
  expect_gradients();
  hand_over(/*arrivals=*/true);
  some_sit_out_ = false;
}

void Engine::refuse_if_sitting_out() const {
  if (sits_out_)
    throw GuardError(text("step ", step_, ": rank ", communicator_->rank().value,
                          " said in join that it has no batch, and has taken part without gradients, but now it trains on "
                          "one; call Sharded::join before each batch, with true while there is one"));
}

}  // namespace tessera
