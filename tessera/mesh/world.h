#pragma once

#include <string>

#include "tessera/base/types.h"

namespace tessera {

/// The processes of one run and this process's place among them. A value: it holds no connection.
struct World {
  Rank rank{0};
  int size = 1;
  Rank local_rank{0};         ///< place among the ranks of this host
  int local_size = 1;         ///< ranks of this run on this host
  std::string run = "";       ///< names this run on this host; two runs never share it
  std::string launcher = "";  ///< who started the ranks: "torchrun", "Open MPI", "Slurm", or "" for a single process

  /// Reads what a launcher left in the environment: torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
  /// MASTER_PORT; `tessera launch` sets the same), else Open MPI's, else Slurm's. None of them means one rank.
  /// Throws ConfigError naming the variable that is missing or contradicts another.
  static World from_env();
};

}  // namespace tessera
