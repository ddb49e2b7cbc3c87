#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// A 64-bit hash (XXH3) of `bytes` bytes: for finding differences between ranks, not for security.
uint64_t hash_of_bytes(const void* data, int64_t bytes);
/// Of a dense tensor's elements, in row-major order.
uint64_t hash_of_values(const at::Tensor& tensor);

}  // namespace tessera
