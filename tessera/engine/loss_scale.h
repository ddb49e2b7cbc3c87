#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

/// How a loss is scaled, so that gradients too small for fp16 survive backward (Micikevicius et al. 2018, "Mixed precision
/// training", section 3.2). The defaults are torch.amp.GradScaler's, but for `min`, which it has not.
struct LossScale {
  double initial = 65536;
  double growth_factor = 2;     ///< multiplies the scale after `growth_interval` applied steps in a row
  double backoff_factor = 0.5;  ///< multiplies the scale at a step whose gradients are not all finite; that step is skipped
  int64_t growth_interval = 2000;  ///< steps
  double min = 1;                  ///< at this scale gradients that are not finite are ShardOptions::non_finite's business

  static LossScale dynamic() { return {}; }
  /// Never changes; gradients that are not finite are ShardOptions::non_finite's business.
  static LossScale fixed(double scale) {
    return {.initial = scale, .growth_factor = 1, .backoff_factor = 1, .growth_interval = 1, .min = scale};
  }
  bool changes() const { return backoff_factor < 1; }
};

/// "none", "fixed 1024", "dynamic from 65536 by 2 and 0.5 every 2000 steps, 1 or more".
std::string name_of(const std::optional<LossScale>& scale);

/// What a checkpoint keeps of a loss scale.
struct LossScaleState {
  double scale = 1;
  int64_t good_steps = 0;  ///< applied since the scale last changed
};

/// The scale as it changes from step to step. Pure: every rank has its own, and tells it the same.
class LossScaler {
 public:
  /// Without a LossScale the scale is 1. Throws ConfigError naming a value outside its range.
  explicit LossScaler(const std::optional<LossScale>& rule);

  bool in_use() const { return in_use_; }
  double scale() const { return state_.scale; }
  bool can_back_off() const { return rule_.changes() && state_.scale > rule_.min; }
  bool changes() const { return in_use_ && rule_.changes(); }
  void applied();   ///< a step was applied
  void back_off();  ///< a step was skipped because of a gradient that is not finite

  const LossScaleState& state() const { return state_; }
  /// Throws ConfigError for a state that this rule can't come to.
  void set_state(const LossScaleState& state);

 private:
  bool in_use_;
  LossScale rule_;
  LossScaleState state_;
};

}  // namespace tessera
