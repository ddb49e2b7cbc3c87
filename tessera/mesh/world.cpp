#include "tessera/mesh/world.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>

#include "tessera/base/environment.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

int optional(const char* name, int otherwise) {
  const int64_t value = environment_integer(name).value_or(otherwise);
  if (!std::in_range<int>(value)) throw ConfigError(text("environment variable ", name, " can't be ", value));
  return static_cast<int>(value);
}

int required(const char* name, const char* because) {
  if (!environment(name)) throw ConfigError(text(because, " is set, but ", name, " is not; a launcher sets both"));
  return optional(name, 0);
}

std::string joined(std::initializer_list<const char*> names) {
  std::string key;
  for (const char* name : names) key += environment(name).value_or("-") + "/";
  return key;
}

World checked(World world, const char* rank_name, const char* size_name) {
  const auto check = [](bool good, const std::string& message) {
    if (!good) throw ConfigError(message);
  };
  check(world.size >= 1, text(size_name, " must be at least 1, but is ", world.size));
  check(world.rank.value >= 0 && world.rank.value < world.size,
        text(rank_name, " must be in 0 … ", world.size - 1, " (", size_name, " is ", world.size, "), but is ",
             world.rank.value));
  check(world.local_size >= 1 && world.local_size <= world.size,
        text("the number of ranks on this host is said to be ", world.local_size, ", but ", size_name, " is ", world.size));
  check(world.local_rank.value >= 0 && world.local_rank.value < world.local_size,
        text("the local rank is ", world.local_rank.value, ", but this host has ", world.local_size, " ranks"));
  check(world.local_size < world.size || world.local_rank == world.rank,
        text("all ", world.size, " ranks are on this host, where the local rank is ", world.local_rank.value, ", but ",
             rank_name, " is ", world.rank.value));
  return world;
}

World from_torchrun() {
  World world{.rank = Rank(required("RANK", "WORLD_SIZE")), .size = required("WORLD_SIZE", "RANK"), .launcher = "torchrun"};
  world.local_rank = Rank(optional("LOCAL_RANK", world.rank.value));
  world.local_size = optional("LOCAL_WORLD_SIZE", world.size);
  if (const int port = optional("MASTER_PORT", 29500); port < 1 || port > 65535)
    throw ConfigError(text("MASTER_PORT must be in 1 … 65535, but is ", port));
  world.run = joined({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TESSERA_RUN_ID"});
  return checked(std::move(world), "RANK", "WORLD_SIZE");
}

World from_open_mpi() {
  World world{.rank = Rank(required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
              .size = required("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
              .launcher = "Open MPI"};
  world.local_rank = Rank(optional("OMPI_COMM_WORLD_LOCAL_RANK", world.rank.value));
  world.local_size = optional("OMPI_COMM_WORLD_LOCAL_SIZE", world.size);
  world.run =
      joined({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "SLURM_JOB_ID", "TESSERA_RUN_ID"});
  return checked(std::move(world), "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
}

// Ranks on node `node`, by Slurm's list: "4", "4(x2),1".
std::optional<int> ranks_on_node(const std::string& list, int node) {
  int first = 0;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    int ranks = 0, nodes = 1;
    if (std::sscanf(list.substr(begin, end - begin).c_str(), "%d(x%d)", &ranks, &nodes) < 1) return std::nullopt;
    if (node < (first += nodes)) return ranks;
    begin = end + 1;
  }
  return std::nullopt;
}

int slurm_local_size(int size) {
  const int nodes = optional("SLURM_NNODES", 1);
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"})
    if (const auto list = environment(name); list && environment("SLURM_NODEID"))
      if (const auto ranks = ranks_on_node(*list, optional("SLURM_NODEID", 0))) return *ranks;
  if (nodes > 1 && !environment("SLURM_NTASKS_PER_NODE"))
    throw ConfigError(text("SLURM_NNODES is ", nodes,
                           ", but neither SLURM_STEP_TASKS_PER_NODE (with SLURM_NODEID) nor SLURM_NTASKS_PER_NODE says how "
                           "many ranks this host has; start the ranks with srun --ntasks-per-node"));
  return optional("SLURM_NTASKS_PER_NODE", size);
}

World from_slurm() {
  World world{.rank = Rank(required("SLURM_PROCID", "SLURM_NTASKS")),
              .size = required("SLURM_NTASKS", "SLURM_PROCID"),
              .launcher = "Slurm"};
  world.local_rank = Rank(optional("SLURM_LOCALID", world.rank.value));
  world.local_size = slurm_local_size(world.size);
  world.run = joined({"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_UID", "TESSERA_RUN_ID"});
  return checked(std::move(world), "SLURM_PROCID", "SLURM_NTASKS");
}

}  // namespace

World World::from_env() {
  if (environment("RANK") || environment("WORLD_SIZE")) return from_torchrun();
  if (environment("OMPI_COMM_WORLD_RANK") || environment("OMPI_COMM_WORLD_SIZE")) return from_open_mpi();
  if (environment("SLURM_PROCID") && environment("SLURM_STEP_ID")) return from_slurm();
  return World{.run = text("single-", getpid())};
}

}  // namespace tessera
