#pragma once

#include <string>

#include "tessera/base/types.h"

namespace tessera {

/// Memory that new allocations on this host can still get: MemAvailable, or what the control group leaves, if that is less.
Bytes available_memory();

/// Throws SystemError with both numbers if `wanted` is more than available_memory(). `what` says for what.
void require_memory(Bytes wanted, const std::string& what);

/// Resident and proportional set size of this process, and its peak resident size. Proportional: shared pages are divided by
/// their users.
struct MemoryUse {
  Bytes resident, peak_resident, proportional;
};
MemoryUse memory_use();  ///< reads /proc/self/smaps_rollup, which walks the page tables: milliseconds a gigabyte
Bytes peak_resident();   ///< VmHWM alone; cheap

/// Gives back to the system what was freed and malloc still keeps: between small blocks that live, that can be gigabytes.
/// Milliseconds. Does nothing where malloc is not glibc's.
void return_freed_memory();

}  // namespace tessera
