#pragma once

#include <string>

#include "tessera/base/types.h"

namespace tessera {

/// What this process may use of this host's memory: the least of the physical memory and the limits of its control groups
/// and their parents (version 1 or 2; none set = physical memory). `root` goes before /proc and /sys, for tests.
Bytes memory_limit(const std::string& root = "");

/// What those limits leave: the least of limit − use over the groups and the physical memory, where use does not count file
/// cache that was not touched lately (the kernel drops it when memory is wanted). At least 0.
Bytes memory_left(const std::string& root = "");

}  // namespace tessera
