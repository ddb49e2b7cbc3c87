#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>

namespace tessera {

/// A complex tensor as pairs of reals, with one more dim of size 2 (in the same memory, unless it is lazily conjugated);
/// others as they are. What torch::optim does with complex parameters.
inline at::Tensor real_pairs(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

/// The type of a tensor's elements as real_pairs shows them.
inline c10::ScalarType real_type(c10::ScalarType type) {
  return c10::isComplexType(type) ? c10::toRealValueType(type) : type;
}

}  // namespace tessera
