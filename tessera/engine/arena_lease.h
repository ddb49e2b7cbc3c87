#pragma once

#include <memory>

#include "tessera/comm/shared_memory.h"
#include "tessera/storage/arena.h"

namespace tessera {

/// While it lives, libtorch's CPU tensors of 64 KiB and more grow in this rank's arena, where the peers of `communicator`
/// can read them. At its end the arena's idle pages go back to the system.
class ArenaLease {
 public:
  /// The lease of `communicator`'s arena, shared by all sharded models of this process.
  static std::shared_ptr<ArenaLease> take(const std::shared_ptr<SharedMemory>& communicator);
  ~ArenaLease();
  ArenaLease(const ArenaLease&) = delete;
  ArenaLease& operator=(const ArenaLease&) = delete;

  Arena& arena() { return *arena_; }

 private:
  explicit ArenaLease(std::shared_ptr<SharedMemory> communicator);

  std::shared_ptr<SharedMemory> communicator_;
  std::shared_ptr<Arena> arena_;
};

}  // namespace tessera
