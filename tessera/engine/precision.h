#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "tessera/comm/sum_kernel.h"

namespace tessera {

/// In which types the state of floating-point parameters is kept. Master weights and optimizer moments are fp32 (fp64 for
/// fp64 models).
struct Precision {
  /// What the module computes with; default: each parameter's own type.
  std::optional<c10::ScalarType> working = {};
  /// Of the gradient that one backward reduces; default: the working type. Sums over ranks are formed in fp32 and rounded to
  /// it once. Those of several backwards add up in the master type: in the shards' .grad, or, where replicated gradients
  /// are kept for a later reduction, on each rank before. Replicated gradients are exchanged in it too.
  std::optional<c10::ScalarType> gradient = {};
  /// What floating-point buffers of the module are converted to; default: they stay as they are.
  std::optional<c10::ScalarType> buffers = {};
  /// For modules that are called through tessera::forward: are floating-point inputs converted to the working type, and what
  /// are floating-point outputs converted to (default: they stay as they are)?
  bool cast_inputs = true;
  std::optional<c10::ScalarType> output = {};
};

/// The element type of a floating-point tensor. Throws ConfigError for a type that gradients can't have.
Element element_of(c10::ScalarType type);

/// The type of master weights and optimizer state for parameters of `type`.
constexpr c10::ScalarType master_type(c10::ScalarType type) {
  return type == c10::ScalarType::Double ? c10::ScalarType::Double : c10::ScalarType::Float;
}

/// Can parameters of this type have gradients here?
constexpr bool trainable_type(c10::ScalarType type) {
  return type == c10::ScalarType::Float || type == c10::ScalarType::Double || type == c10::ScalarType::BFloat16 ||
         type == c10::ScalarType::Half;
}

}  // namespace tessera
