#include "tessera/engine/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera {

uint64_t hash_of_bytes(const void* data, int64_t bytes) { return XXH3_64bits(data, static_cast<size_t>(bytes)); }

uint64_t hash_of_values(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  return hash_of_bytes(values.const_data_ptr(), static_cast<int64_t>(values.nbytes()));
}

}  // namespace tessera
