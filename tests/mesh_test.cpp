#include "tessera/mesh/mesh.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/mesh/world.h"
#include "tests/support/refusal.h"

namespace tessera {

void PrintTo(const Rank& rank, std::ostream* stream) { *stream << "rank " << rank.value; }

namespace {

using test::expect_words;
using test::refusal;

std::vector<Rank> ranks(std::initializer_list<int> values) {
  std::vector<Rank> all;
  for (const int value : values) all.emplace_back(value);
  return all;
}

World world_of(int rank, int size) { return {.rank = Rank(rank), .size = size}; }

// ---- mesh ------------------------------------------------------------------------------------------------------------

TEST(Mesh, OneAxisByDefault) {
  const Mesh mesh(world_of(2, 4));
  EXPECT_EQ(mesh.axes().size(), 1U);
  EXPECT_EQ(mesh.size("data"), 4);
  EXPECT_EQ(mesh.coordinate("data"), Rank(2));
  EXPECT_EQ(mesh.peers("data"), ranks({0, 1, 2, 3}));
  EXPECT_EQ(mesh.world().size, 4);
}

TEST(Mesh, TheLastAxisVariesFastest) {
  const std::vector<Axis> axes = {{"replicate", 2}, {"shard", 3}};
  const Mesh mesh(world_of(4, 6), axes);
  EXPECT_EQ(mesh.coordinate("replicate"), Rank(1));
  EXPECT_EQ(mesh.coordinate("shard"), Rank(1));
  EXPECT_EQ(mesh.peers("replicate"), ranks({1, 4}));
  EXPECT_EQ(mesh.peers("shard"), ranks({3, 4, 5}));
}

TEST(Mesh, EveryRankHasItsOwnCoordinatesAndIsAmongItsPeers) {
  const std::vector<Axis> axes = {{"a", 2}, {"b", 3}, {"c", 4}};
  for (int rank = 0; rank < 24; ++rank) {
    const Mesh mesh(world_of(rank, 24), axes);
    const int a = mesh.coordinate("a").value, b = mesh.coordinate("b").value, c = mesh.coordinate("c").value;
    EXPECT_EQ((a * 3 + b) * 4 + c, rank);
    for (const auto& axis : axes) {
      const auto peers = mesh.peers(axis.name);
      ASSERT_EQ(peers.size(), static_cast<size_t>(axis.size));
      EXPECT_EQ(peers[static_cast<size_t>(mesh.coordinate(axis.name).value)], Rank(rank));
    }
  }
}

TEST(Mesh, AnAxisOfOneRank) {
  const Mesh mesh(world_of(1, 2), {{"replicate", 2}, {"shard", 1}});
  EXPECT_EQ(mesh.coordinate("shard"), Rank(0));
  EXPECT_EQ(mesh.peers("shard"), ranks({1}));
  EXPECT_EQ(mesh.peers("replicate"), ranks({0, 1}));
}

TEST(Mesh, RefusalsNameTheAxis) {
  const auto refused = [](int size, const std::vector<Axis>& axes) {
    return refusal<ConfigError>([&] { Mesh(world_of(0, size), axes); });
  };
  expect_words(refused(4, {{"a", 2}, {"b", 3}}), {"6 ranks", "has 4"});
  expect_words(refused(4, {{"a", 2}, {"a", 2}}), {"two axes named 'a'"});
  expect_words(refused(4, {{"a", 4}, {"", 1}}), {"axis 1", "no name"});
  expect_words(refused(4, {{"a", 4}, {"b", 0}}), {"'b'", "at least 1"});
  expect_words(refused(1, {{"a", -1}, {"b", -1}}), {"'a'", "-1"});
  const Mesh mesh(world_of(0, 4), {{"a", 2}, {"b", 2}});
  for (const auto& ask : {refusal<ConfigError>([&] { mesh.size("c"); }), refusal<ConfigError>([&] { mesh.peers("c"); }),
                          refusal<ConfigError>([&] { mesh.coordinate("c"); })})
    expect_words(ask, {"'c'", "'a', 'b'"});
}

// ---- world -----------------------------------------------------------------------------------------------------------

/// The environment of a launcher, and nothing of any other, until the test ends.
class FromEnvironment : public testing::Test {
 protected:
  FromEnvironment() {
    for (const char* name : kNames) {
      const char* value = std::getenv(name);
      before_.emplace_back(name, value != nullptr ? value : "");
      unsetenv(name);
    }
  }
  ~FromEnvironment() override {
    for (const auto& [name, value] : before_) value.empty() ? unsetenv(name) : setenv(name, value.c_str(), 1);
  }

  static World world(const std::vector<std::pair<const char*, const char*>>& variables) {
    for (const char* name : kNames) unsetenv(name);
    for (const auto& [name, value] : variables) setenv(name, value, 1);
    return World::from_env();
  }
  static std::string refused(const std::vector<std::pair<const char*, const char*>>& variables) {
    return refusal<ConfigError>([&] { world(variables); });
  }

 private:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "LOCAL_WORLD_SIZE",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "TORCHELASTIC_RUN_ID",
                                           "TORCHELASTIC_RESTART_COUNT",
                                           "TESSERA_RUN_ID",
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                                           "OMPI_MCA_ess_base_jobid",
                                           "OMPI_MCA_orte_hnp_uri",
                                           "PMIX_NAMESPACE",
                                           "SLURM_PROCID",
                                           "SLURM_NTASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_NTASKS_PER_NODE",
                                           "SLURM_TASKS_PER_NODE",
                                           "SLURM_STEP_TASKS_PER_NODE",
                                           "SLURM_NNODES",
                                           "SLURM_NODEID",
                                           "SLURM_JOB_ID",
                                           "SLURM_STEP_ID",
                                           "SLURM_JOB_UID"};
  std::vector<std::pair<const char*, std::string>> before_;
};

TEST_F(FromEnvironment, NothingMeansOneRank) {
  const World alone = world({});
  EXPECT_EQ(alone.rank, Rank(0));
  EXPECT_EQ(alone.size, 1);
  EXPECT_EQ(alone.local_size, 1);
  EXPECT_EQ(alone.launcher, "");
  expect_words(alone.run, {std::to_string(getpid())});
}

TEST_F(FromEnvironment, Torchrun) {
  const World here =
      world({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(here.rank, Rank(5));
  EXPECT_EQ(here.size, 8);
  EXPECT_EQ(here.local_rank, Rank(1));
  EXPECT_EQ(here.local_size, 4);
  EXPECT_EQ(here.launcher, "torchrun");
}

TEST_F(FromEnvironment, TorchrunWithoutLocalNumbersIsOneHost) {
  const World here = world({{"RANK", "2"}, {"WORLD_SIZE", "3"}});
  EXPECT_EQ(here.local_rank, Rank(2));
  EXPECT_EQ(here.local_size, 3);
}

void expect_rank_3_of_2_hosts(const World& here, const std::string& launcher, const std::string& in_run) {
  EXPECT_EQ(here.rank, Rank(3));
  EXPECT_EQ(here.size, 4);
  EXPECT_EQ(here.local_rank, Rank(1));
  EXPECT_EQ(here.local_size, 2);
  EXPECT_EQ(here.launcher, launcher);
  expect_words(here.run, {in_run});
}

TEST_F(FromEnvironment, OpenMpi) {
  expect_rank_3_of_2_hosts(world({{"OMPI_COMM_WORLD_RANK", "3"},
                                  {"OMPI_COMM_WORLD_SIZE", "4"},
                                  {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                  {"PMIX_NAMESPACE", "prterun-host-7@1"}}),
                           "Open MPI", "prterun-host-7@1");
}

TEST_F(FromEnvironment, Slurm) {
  expect_rank_3_of_2_hosts(world({{"SLURM_PROCID", "3"},
                                  {"SLURM_NTASKS", "4"},
                                  {"SLURM_LOCALID", "1"},
                                  {"SLURM_NTASKS_PER_NODE", "2"},
                                  {"SLURM_JOB_ID", "712"},
                                  {"SLURM_STEP_ID", "0"}}),
                           "Slurm", "712");
}

TEST_F(FromEnvironment, SlurmsListSaysHowManyRanksAHostHas) {
  const auto local_size = [](const char* list, const char* node) {
    return world({{"SLURM_PROCID", "3"},
                  {"SLURM_NTASKS", "9"},
                  {"SLURM_LOCALID", "0"},
                  {"SLURM_STEP_ID", "0"},
                  {"SLURM_NNODES", "3"},
                  {"SLURM_STEP_TASKS_PER_NODE", list},
                  {"SLURM_NODEID", node}})
        .local_size;
  };
  EXPECT_EQ(local_size("4(x2),1", "0"), 4);
  EXPECT_EQ(local_size("4(x2),1", "1"), 4);
  EXPECT_EQ(local_size("4(x2),1", "2"), 1);
  EXPECT_EQ(local_size("2,3,4", "1"), 3);
  // Several hosts of unknown sizes must not be taken for one.
  expect_words(refused({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "0"}, {"SLURM_NNODES", "2"}}),
               {"SLURM_NNODES is 2", "SLURM_NTASKS_PER_NODE"});
}

TEST_F(FromEnvironment, AnAllocationOfSlurmIsNotALaunch) {
  EXPECT_EQ(world({{"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "712"}}).size, 1);
}

TEST_F(FromEnvironment, TorchrunInsideOthersCounts) {
  const World here = world({{"RANK", "1"},
                            {"WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_RANK", "0"},
                            {"OMPI_COMM_WORLD_SIZE", "1"},
                            {"SLURM_PROCID", "0"},
                            {"SLURM_NTASKS", "1"},
                            {"SLURM_STEP_ID", "0"}});
  EXPECT_EQ(here.launcher, "torchrun");
  EXPECT_EQ(here.rank, Rank(1));
}

TEST_F(FromEnvironment, AnEmptyVariableIsNotSet) {
  EXPECT_EQ(world({{"RANK", ""}, {"WORLD_SIZE", ""}}).launcher, "");
  expect_words(refused({{"RANK", "0"}, {"WORLD_SIZE", ""}}), {"WORLD_SIZE", "not"});
}

TEST_F(FromEnvironment, WhatIsMissingIsNamed) {
  expect_words(refused({{"RANK", "0"}}), {"RANK is set", "WORLD_SIZE is not"});
  expect_words(refused({{"WORLD_SIZE", "2"}}), {"WORLD_SIZE is set", "RANK is not"});
  expect_words(refused({{"OMPI_COMM_WORLD_SIZE", "2"}}), {"OMPI_COMM_WORLD_RANK is not"});
  expect_words(refused({{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}}), {"SLURM_NTASKS is not"});
}

TEST_F(FromEnvironment, WhatIsNoIntegerIsNamed) {
  for (const char* wrong : {"two", "1.5", "2 ", "0x2", "99999999999999999999"})
    expect_words(refused({{"RANK", "0"}, {"WORLD_SIZE", wrong}}), {"WORLD_SIZE", wrong});
  expect_words(refused({{"RANK", "4294967296"}, {"WORLD_SIZE", "2"}}), {"RANK", "4294967296"});  // 2³² must not become 0
  expect_words(refused({{"RANK", "0"}, {"WORLD_SIZE", "4294967297"}}), {"WORLD_SIZE", "4294967297"});
}

TEST_F(FromEnvironment, ContradictionsAreNamed) {
  expect_words(refused({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), {"RANK", "0 … 1", "is 2"});
  expect_words(refused({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), {"RANK", "-1"});
  expect_words(refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "99999"}}), {"MASTER_PORT", "65535", "99999"});
  expect_words(refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), {"WORLD_SIZE", "at least 1"});
  expect_words(refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "3"}}),
               {"this host", "3", "WORLD_SIZE is 2"});
  expect_words(refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "0"}}), {"this host", "0"});
  expect_words(refused({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}),
               {"local rank is 2", "2 ranks"});
  expect_words(refused({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "-1"}, {"LOCAL_WORLD_SIZE", "2"}}),
               {"local rank is -1"});
  // All ranks on this host: then the two numbers of a rank are the same.
  expect_words(refused({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "4"}}),
               {"local rank is 2", "RANK is 1"});
  expect_words(refused({{"OMPI_COMM_WORLD_RANK", "4"}, {"OMPI_COMM_WORLD_SIZE", "4"}}),
               {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"});
  expect_words(refused({{"SLURM_PROCID", "4"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "0"}}),
               {"SLURM_PROCID", "SLURM_NTASKS"});
}

TEST_F(FromEnvironment, RunsHaveNamesOfTheirOwn) {
  const auto run = [](std::vector<std::pair<const char*, const char*>> more, const char* rank = "0") {
    more.insert(more.end(), {{"RANK", rank}, {"WORLD_SIZE", "2"}});
    return world(more).run;
  };
  const std::string first = run({{"MASTER_PORT", "29500"}, {"TESSERA_RUN_ID", "a"}});
  EXPECT_EQ(run({{"MASTER_PORT", "29500"}, {"TESSERA_RUN_ID", "a"}}, "1"), first);  // all ranks of a run agree
  EXPECT_NE(run({{"MASTER_PORT", "29500"}, {"TESSERA_RUN_ID", "b"}}), first);
  EXPECT_NE(run({{"MASTER_PORT", "29501"}, {"TESSERA_RUN_ID", "a"}}), first);
  EXPECT_NE(run({{"MASTER_PORT", "29500"}, {"TESSERA_RUN_ID", "a"}, {"TORCHELASTIC_RESTART_COUNT", "1"}}),
            first);  // after a restart
  const auto slurm = [](const char* job, const char* step) {
    return world({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", job}, {"SLURM_STEP_ID", step}}).run;
  };
  EXPECT_NE(slurm("1", "0"), slurm("2", "0"));
  EXPECT_NE(slurm("1", "0"), slurm("1", "1"));
}

}  // namespace
}  // namespace tessera
