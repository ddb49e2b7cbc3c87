#pragma once

#include <chrono>
#include <vector>

#include "tessera/base/descriptor.h"
#include "tessera/mesh/world.h"

namespace tessera {

/// What the ranks of one host know of each other once they have met.
struct Meeting {
  Descriptor memory;  ///< a nameless file in memory of `bytes` bytes, the same for all; nobody outside the run can open it
  int64_t bytes = 0;
  std::vector<int> process_ids;  ///< by local rank
};

/// Lets the local ranks of `world` meet: local rank 0 creates a memfd of `bytes` bytes (sparse; where the
/// system refuses that, a nameless file of mode 0600 in /dev/shm, which is said on stderr) and hands it to the others
/// over a Unix socket in the abstract name space, which leaves no file behind; both ends check that the other runs as the
/// same user. `generation` counts the meetings of this run. Throws PeerError naming the ranks that did not come within
/// `timeout`, and SystemError if the system refuses both, or a socket.
Meeting meet(const World& world, int generation, int64_t bytes, std::chrono::milliseconds timeout);

}  // namespace tessera
