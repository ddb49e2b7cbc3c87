#pragma once

#include <nlohmann/json_fwd.hpp>

namespace tessera::cli {

/// What only trying shows: a container may refuse what its kernel has.

/// {"memfd", "pidfd", "futex", "descriptor_passing", "io_uring"}: null if the call works, else why it doesn't.
nlohmann::json try_system_calls();

/// {"size_bytes", "free_bytes", "writable"} of /dev/shm, or null if it isn't there.
nlohmann::json try_dev_shm();

/// {"open_files", "locked_bytes", "address_space_bytes", "processes"}: the soft limits (ulimit) of this process; null: none.
nlohmann::json read_limits();

}  // namespace tessera::cli
