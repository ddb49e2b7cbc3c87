#pragma once

#include <string>

#include "tessera/base/types.h"

namespace tessera {

/// What this process may use of this host's memory: the least of the physical memory and the limits of its control groups
/// and their parents (version 1 or 2; none set = physical memory). `root` goes before /proc and /sys, for tests.
Bytes memory_limit(const std::string& root = "");

/// How much one of `local_ranks` ranks may commit in its arena: TESSERA_ARENA_BOUND_BYTES if set, else its equal part of
/// three quarters of `memory_limit`. Throws ConfigError if the variable is not a positive integer.
Bytes default_arena_bound(int local_ranks = 1);

}  // namespace tessera
