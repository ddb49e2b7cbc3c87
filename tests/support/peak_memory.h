#pragma once

#include <cstdint>
#include <fstream>

#include "tessera/storage/memory.h"

namespace tessera::test {

/// peak_resident() begins anew.
inline void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

/// Most resident memory while `action` runs, over that before; bytes.
template <class Action>
int64_t peak_of(Action&& action) {
  forget_peak();
  const Bytes before = memory_use().resident;
  action();
  return (peak_resident() - before).value;
}

}  // namespace tessera::test
