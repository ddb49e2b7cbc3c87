// Ranks whose system refuses memfds share memory through a nameless file of their own.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/cases.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

/// This process is refused memfds from now on, as in a container with a filter.
void refuse_memfds() {
  sock_filter rules[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{std::size(rules), rules};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
  ASSERT_EQ(memfd_create("refused", 0), -1);
}

/// This process has memory mapped of a file in /dev/shm that has no name.
bool maps_a_nameless_file() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find(" /dev/shm/#") != std::string::npos && line.find("(deleted)") != std::string::npos) return true;
  return false;
}

size_t names_in_shared_memory() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/dev/shm"), {}));
}

TEST(RefusedMemfd, RanksTrainThroughANamelessFile) {
  const size_t before = names_in_shared_memory();
  on_ranks(2, [](World world) {
    refuse_memfds();
    testing::internal::CaptureStderr();
    auto net = common_net();
    auto sharded = fully_shard(net, Mesh(world), net_s_options(zero3()));
    const std::string said = testing::internal::GetCapturedStderr();
    if (world.rank == Rank(0))
      expect_words(said, {"refuses memfds", "/dev/shm", "MiB are free"});
    else
      EXPECT_EQ(said, "");
    EXPECT_TRUE(maps_a_nameless_file());
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    expect_sgd_steps(net, sharded, optimizer, world);
  });
  EXPECT_EQ(names_in_shared_memory(), before);
}

}  // namespace
}  // namespace tessera::test
