#pragma once

#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/engine/unit.h"

namespace tessera {

/// Where initial values come from.
enum class Initial : uint8_t {
  verify,     ///< every rank has the same values already; a difference is an error
  broadcast,  ///< rank 0's values replace the others'
};

/// Throws AgreementError on all ranks, naming the first difference and both sides, unless all ranks shard the same units
/// with the same parameters (names, shapes, types, requires_grad), the same `options` and, if `initial` is verify, the same
/// values. Deferred parameters get values for that, a unit at a time, and stay deferred. Collective.
void agree(Communicator& communicator, const std::vector<UnitSpec>& units, const std::string& options, Initial initial);

/// Overwrites the parameters of one unit on all ranks by rank 0's. Needs `agree` before. Collective; memory O(8 MiB).
void broadcast_values(Communicator& communicator, UnitSpec& unit);

}  // namespace tessera
