#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera::cli {

/// What all ranks of one launch have in common.
struct LaunchPlace {
  int ranks = 1;
  std::string run_id{};  ///< names this launch among all others: 32 random hexadecimal digits
  uint16_t port = 0;     ///< where rank 0 may listen, on loopback
  int cores = 1;         ///< that this process may use
  std::vector<std::pair<std::string, std::string>> extra_environment{};  ///< wins over everything else
};

/// The environment of `rank` as "NAME=value" strings: `inherited` (null-terminated, as `environ`), with torchrun's variables
/// (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, ROLE_*, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_*), with
/// TESSERA_RUN_ID, and with OMP_NUM_THREADS = cores / ranks (at least 1) unless it is set already. Pure.
std::vector<std::string> rank_environment(int rank, const LaunchPlace& place, const char* const* inherited);

/// 128 random bits as 32 hexadecimal digits.
std::string random_id();

/// A TCP port on which nobody listens on loopback now. It is not kept: as with torchrun, another program could take it
/// first. Throws SystemError if there is none.
uint16_t free_port();

/// How many cores this process may run on (its affinity, not the machine's size).
int usable_cores();

}  // namespace tessera::cli
