#pragma once

#include <cstdint>

namespace tessera {

/// What the sum of gradients is divided by while some ranks have no batch (see Sharded::join).
enum class DivideBy : uint8_t {
  ranks,         ///< all ranks: a rank without a batch counts as zeros (torch: divide_by_initial_world_size)
  active_ranks,  ///< the ranks that have one: gradients are the mean of their gradients
  samples,       ///< as Sharded::weight_by: gradients are the mean over all ranks' samples
};

}  // namespace tessera
