// The part of Engine that sees to the loss scale.
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/engine.h"

namespace tessera {

void Engine::tell_units_loss_scale() {
  for (const auto& unit : units_) unit->set_loss_scale(scaler_.scale());
}

void Engine::set_loss_scale_state(const LossScaleState& state) {
  settle();
  if (rounds_ > 0 || backwards_ > 0)
    throw GuardError(text("the loss scale can't be set while gradients of step ", step_,
                          " wait for the optimizer; set it between a step and the next backward"));
  scaler_.set_state(state);
  tell_units_loss_scale();
}

void Engine::on_scaled_loss(double scale) {
  if (scale != scaler_.scale())
    throw GuardError(text("this loss was scaled by ", scale, " before the loss scale became ", scaler_.scale(),
                          "; call Sharded::scale between the last step and backward"));
  loss_was_scaled_ = true;
}

void Engine::refuse_unscaled(const std::string& parameter) const {
  throw GuardError(text("a gradient of parameter '", parameter, "' came from a loss that was not scaled (step ", step_,
                        "), but this model is sharded with a loss scale; call sharded.scale(loss).backward()"));
}

}  // namespace tessera
