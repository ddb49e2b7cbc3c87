#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace tessera {

/// From now on `missing` is called when `parameter.grad()` is asked for and there is none, as an optimizer does in its step.
/// Not for mutable_grad(), by which gradients are set and dropped. The parameter must not be a view; costs a virtual call
/// that autograd makes anyway.
void watch_missing_gradient(const at::Tensor& parameter, std::function<void()> missing);

}  // namespace tessera
