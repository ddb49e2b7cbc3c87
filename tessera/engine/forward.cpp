#include "tessera/engine/forward.h"

#include "tessera/engine/engine.h"

namespace tessera {
namespace {

const Engine* engine_of(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    const auto* owner = static_cast<const Observed*>(GuardedStorage::owner_of(item.value()));
    if (owner == nullptr) continue;
    if (const auto* engine = dynamic_cast<const Engine*>(owner->handler)) return engine;
  }
  for (const auto& child : module.children())
    if (const auto* engine = engine_of(*child)) return engine;
  return nullptr;
}

}  // namespace

BorderTypes border_types(const torch::nn::Module& module) {
  const Engine* engine = engine_of(module);
  if (engine == nullptr) return {};
  const Precision& precision = engine->precision();
  return {precision.cast_inputs ? precision.working : std::nullopt, precision.output};
}

}  // namespace tessera
