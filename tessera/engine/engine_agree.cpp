// The part of Engine in which ranks compare what they are about to do in a step.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/packed.h"
#include "tessera/base/text.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/hash.h"

namespace tessera {
namespace {

// What each rank says of each unit.
constexpr char kAnyGradient = 1, kTouchedLate = 2;

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

// By parameter, whether it requires a gradient.
std::string trainable_of(const std::vector<std::unique_ptr<Unit>>& units) {
  std::string flags;
  for (const auto& unit : units)
    for (const auto& parameter : unit->parameters()) flags += parameter.tensor.requires_grad() ? '1' : '0';
  return flags;
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

// Hashes of what this rank updates and others too, from time to time; none where another rank updates nothing of it.
std::vector<uint64_t> Engine::replicas_to_compare() const {
  if (step_ > 4 && step_ % 16 != 0) return {};
  std::vector<uint64_t> hashes;
  for (const auto& unit : units_)
    if (unit->shares_sums() && unit->trainable())
      for (const auto& parameter : unit->parameters()) hashes.push_back(hash_of_values(parameter.shard));
  return hashes;
}

// Ranks that update the same elements have to do it alike; nothing else would show that they don't. What requires a gradient
// has to be the same on all.
void Engine::refuse_drifted_replicas(const std::vector<std::string>& answers, size_t begin) const {
  std::vector<std::vector<uint64_t>> hashes;
  for (const auto& answer : answers) hashes.push_back(unpacked_all<uint64_t>(answer.substr(begin)));
  size_t i = 0;
  for (const auto& unit : units_) {
    if (!unit->shares_sums() || !unit->trainable()) continue;
    for (const auto& parameter : unit->parameters()) {
      std::map<int, size_t> first;  // rank of each part
      for (size_t r = 0; r < hashes.size(); ++r) {
        if (i >= hashes[r].size()) return;  // not in this step
        const auto [one, fresh] = first.emplace(unit->division().optimizer_part(Rank(static_cast<int>(r))), r);
        if (!fresh && hashes[r][i] != hashes[one->second][i])
          throw AgreementError(text("step ", step_, ": the values of parameter '", parameter.name, "' (unit '", unit->name(),
                                    "') have come to differ between ranks ", one->second, " and ", r,
                                    ", which both update them: their optimizers' options, or what was done to their "
                                    "gradients, were not the same. Give all ranks the same learning rate, and change "
                                    "gradients alike"));
      }
      ++i;
    }
  }
}

void Engine::refuse_other_trainable() const {
  const auto everyones = communicator_->all_gather("which parameters require a gradient", trainable_of(units_));
  size_t i = 0;
  for (const auto& unit : units_)
    for (const auto& parameter : unit->parameters()) {
      for (size_t r = 1; r < everyones.size(); ++r)
        if (everyones[r].at(i) != everyones[0].at(i))
          throw AgreementError(text(
              "step ", step_, ": parameter '", parameter.name, "' (unit '", unit->name(), "') requires ",
              everyones[0][i] == '1' ? "a gradient on rank 0 and none on rank " : "no gradient on rank 0 and one on rank ",
              r, "; call set_requires_grad alike on all ranks"));
      ++i;
    }
}

bool Engine::agree_on_step() {
  const int32_t backwards = std::max(1, backwards_);  // a rank without any takes part with nothing
  const int32_t looks = take_looks();
  const std::string trainable = trainable_of(units_);
  StepFacts first_bad{step_,
                      backwards,
                      looks,
                      kNone,
                      kNone,
                      scaler_.scale(),
                      hash_of_bytes(trainable.data(), static_cast<int64_t>(trainable.size())),
                      consumer_ != nullptr ? consumer_->settings() : outside_settings_};
  std::string mine = packed(facts_of(units_, first_bad));
  for (const auto& unit : units_)
    mine += static_cast<char>((unit->any_gradient() ? kAnyGradient : 0) | (unit->touched_after_complete ? kTouchedLate : 0));
  const std::string values = packed(replicas_to_compare());
  mine += values;
  const auto answers = communicator_->all_gather(text("optimizer step ", step_), mine);
  updated_anywhere_.assign(units_.size(), false);
  int bad_rank = 0;
  for (int r = 0; r < communicator_->size(); ++r) {
    const std::string& answer = answers[static_cast<size_t>(r)];
    const auto facts = unpacked<StepFacts>(answer);
    for (size_t u = 0; u < units_.size(); ++u) {
      const char flags = answer.at(sizeof(StepFacts) + u);
      updated_anywhere_[u] = updated_anywhere_[u] || (flags & kAnyGradient) != 0;
      units_[u]->posts_at_end |= (flags & kTouchedLate) != 0;
    }
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
    if (facts.trainable != first_bad.trainable) refuse_other_trainable();
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
  refuse_drifted_replicas(answers, mine.size() - values.size());
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

}  // namespace tessera
