#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "tessera/base/descriptor.h"

namespace tessera::cli {

/// Processes other than this one whose environment, as they were started with it, holds `entry` ("NAME=value") and that we
/// may look at. What a rank starts inherits its TESSERA_RUN_ID, so this finds it even in a process group or session of its
/// own.
std::vector<pid_t> processes_with(const std::string& entry);

/// Kills (SIGKILL) the process groups `groups` and all processes with `entry` until none is left; gives up after a second.
/// The groups must still be those of this launch (their leaders not reaped). Costs a look at each process of the host.
void sweep(const std::vector<pid_t>& groups, const std::string& entry);

/// A small process that outlives a launcher killed with SIGKILL for long enough to `sweep` in its place: the kernel kills
/// the ranks then, but not what they started. Ends with this object.
class Watchdog {
 public:
  /// Throws SystemError if there is no process to be had. Start it after the ranks, which must not inherit its pipe.
  Watchdog(const std::vector<pid_t>& groups, const std::string& entry);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  pid_t pid_ = -1;
  Descriptor alive_;  ///< closes when this process ends, however it ends
};

}  // namespace tessera::cli
