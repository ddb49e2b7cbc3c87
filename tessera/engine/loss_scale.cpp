#include "tessera/engine/loss_scale.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

void require(bool good, const char* name, double value, const char* wanted) {
  if (!good) throw ConfigError(text("loss_scale: ", name, " must be ", wanted, ", but is ", value));
}

}  // namespace

std::string name_of(const std::optional<LossScale>& scale) {
  if (!scale) return "none";
  if (!scale->changes()) return text("fixed ", scale->initial);
  return text("dynamic from ", scale->initial, " by ", scale->growth_factor, " and ", scale->backoff_factor, " every ",
              scale->growth_interval, " steps, ", scale->min, " or more");
}

LossScaler::LossScaler(const std::optional<LossScale>& rule)
    : in_use_(rule.has_value()), rule_(rule.value_or(LossScale::fixed(1))) {
  require(std::isfinite(rule_.initial) && rule_.initial > 0, "the scale", rule_.initial, "finite and more than 0");
  require(std::isfinite(rule_.growth_factor) && rule_.growth_factor >= 1, "growth_factor", rule_.growth_factor,
          "finite and 1 or more");
  require(rule_.backoff_factor > 0 && rule_.backoff_factor <= 1, "backoff_factor", rule_.backoff_factor, "in (0, 1]");
  require(rule_.changes() || rule_.growth_factor == 1, "backoff_factor", rule_.backoff_factor,
          "less than 1 where the scale grows");
  require(rule_.growth_interval >= 1, "growth_interval", static_cast<double>(rule_.growth_interval), "1 or more");
  require(rule_.min > 0 && rule_.min <= rule_.initial, "min", rule_.min, "more than 0, and at most the initial scale");
  state_.scale = rule_.initial;
}

void LossScaler::applied() {
  if (!changes() || ++state_.good_steps < rule_.growth_interval) return;
  state_.good_steps = 0;
  const double grown = state_.scale * rule_.growth_factor;
  if (grown <= std::numeric_limits<float>::max()) state_.scale = grown;  // losses are scaled in fp32
}

void LossScaler::back_off() {
  if (!changes()) return;
  state_.good_steps = 0;
  state_.scale = std::max(rule_.min, state_.scale * rule_.backoff_factor);
}

void LossScaler::set_state(const LossScaleState& state) {
  if (!in_use_)
    throw ConfigError(
        "this model was sharded without a loss scale, so it has no state to set; set ShardOptions::loss_scale");
  if (!changes()) require(state.scale == rule_.initial, "a fixed scale", state.scale, "what the options say");
  require(std::isfinite(state.scale) && state.scale >= rule_.min, "the scale", state.scale, "finite, and min or more");
  require(state.good_steps >= 0 && (!changes() || state.good_steps < rule_.growth_interval), "good_steps",
          static_cast<double>(state.good_steps), "0 or more, and less than growth_interval");
  state_ = state;
}

}  // namespace tessera
