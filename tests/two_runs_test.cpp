// Two runs on one host at once, and other users of that host: they never meet.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/shared_memory.h"
#include "tessera/tessera.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_array.h"
#include "tests/support/stack.h"

namespace tessera::test {
namespace {

constexpr uid_t kNobody = 65534;

/// One of two runs of two ranks each, whose processes a test starts as four ranks.
struct Launched {
  int index;
  World world;
};

// The environment that a launcher of one run gives to one of its ranks: the same MASTER_PORT for both runs.
Launched enter_run(const World& world, const std::string& name) {
  const int run = world.rank.value / 2, rank = world.rank.value % 2;
  setenv("RANK", text(rank).c_str(), 1);
  setenv("LOCAL_RANK", text(rank).c_str(), 1);
  setenv("WORLD_SIZE", "2", 1);
  setenv("LOCAL_WORLD_SIZE", "2", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", "29500", 1);
  setenv("TESSERA_RUN_ID", name.c_str(), 1);
  setenv("TESSERA_TIMEOUT_MS", "20000", 1);
  return {run, World::from_env()};
}

// Trains on samples that only this run has; returns Σ of the parameters.
double train(const Launched& run) {
  Stack net;
  auto sharded = fully_shard(net, Mesh(run.world), stack_options(zero3()));
  torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
  const auto processes = sharded.engine().communicator().all_gather("processes", std::to_string(getpid()));
  EXPECT_EQ(processes.size(), 2U);
  for (int step = 0; step < 20; ++step) {
    stack_loss(net, 2 * run.index + run.world.rank.value).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  double sum = 0;
  for (const auto& [name, value] : sharded.full_parameters()) sum += value.to(torch::kDouble).sum().item<double>();
  sharded.engine().communicator().barrier("read");
  return sum;
}

double train_unsharded(int run) {
  Stack net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 20; ++step) {
    ((stack_loss(net, 2 * run) + stack_loss(net, 2 * run + 1)) / 2).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  double sum = 0;
  for (const auto& parameter : net->parameters()) sum += parameter.to(torch::kDouble).sum().item<double>();
  return sum;
}

void expect_own_numbers(const Launched& run) {
  const double mine = train(run), other = train_unsharded(1 - run.index);
  EXPECT_NEAR(mine, train_unsharded(run.index), 1e-5);
  EXPECT_GT(std::abs(mine - other), 1e-2) << "the two runs can't be told apart";
}

TEST(TwoRuns, RunsOfDifferentNamesNeverMeet) {
  on_ranks(4, [](World world) { expect_own_numbers(enter_run(world, world.rank.value < 2 ? "first" : "second")); });
}

// Each of many starts must find its own: both runs connect, disconnect and connect again at once.
TEST(TwoRuns, StartingManyTimesAtOnce) {
  on_ranks(4, [](World world) {
    const Launched run = enter_run(world, world.rank.value < 2 ? "first" : "second");
    for (int time = 0; time < 30; ++time) {
      const auto communicator = SharedMemory::connect(run.world);
      for (const auto& theirs : communicator->all_gather("run", text(run.index, " ", time)))
        EXPECT_EQ(theirs, text(run.index, " ", time));
    }
  });
}

void become(uid_t user) {
  if (setgid(user) != 0 || setuid(user) != 0) throw std::runtime_error("setuid");
}

// One run is root's, the other nobody's; nothing else tells them apart.
TEST(TwoRuns, RunsOfTwoUsersNeverMeet) {
  if (getuid() != 0) GTEST_SKIP() << "only root can start processes of two users";
  on_ranks(4, [](World world) {
    if (world.rank.value >= 2) become(kNobody);
    expect_own_numbers(enter_run(world, "the same"));
  });
}

// ---- strangers
// ------------------------------------------------------------------------------------------------------------

/// The abstract name of the socket at which rank 0, process `host`, waits for the others; "" if it doesn't within ten
/// seconds.
std::string meeting_place_of(pid_t host) {
  const auto start = std::chrono::steady_clock::now();
  for (; std::chrono::steady_clock::now() - start < std::chrono::seconds(10); usleep(1000)) {
    std::set<std::string> sockets;  // of that process, by inode
    std::error_code gone;
    for (const auto& entry : std::filesystem::directory_iterator(text("/proc/", host, "/fd"), gone)) {
      const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
      if (target.starts_with("socket:[")) sockets.insert(target.substr(8, target.size() - 9));
    }
    std::ifstream all("/proc/net/unix");
    for (std::string line; std::getline(all, line);) {
      std::istringstream words(line);
      std::string skipped, inode, name;
      for (int i = 0; i < 6; ++i) words >> skipped;
      if (words >> inode >> name && name.starts_with("@tessera-") && sockets.contains(inode)) return name.substr(1);
    }
  }
  return "";
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// What a process that connects there is told: the bytes, and whether a descriptor came with them.
struct Answer {
  bool connected = false;
  ssize_t bytes = 0;
  bool descriptor = false;
};

Answer knock(const std::string& name) {
  Answer answer;
  const int knocking = socket(AF_UNIX, SOCK_STREAM, 0);
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  answer.connected = connect(knocking, reinterpret_cast<const sockaddr*>(&address), length) == 0;
  // As a rank would: protocol, local rank 1 of 2, a process.
  const int32_t hello[] = {0x7e55e7a1, 1, 2, getpid()};
  if (send(knocking, hello, sizeof hello, MSG_NOSIGNAL) < 0) answer.bytes = 0;
  char bytes[4096], control[256];
  iovec part{bytes, sizeof bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  pollfd ready{knocking, POLLIN, 0};
  if (poll(&ready, 1, 5000) > 0) answer.bytes = recvmsg(knocking, &message, 0);
  answer.descriptor = answer.bytes > 0 && message.msg_controllen > 0;
  close(knocking);
  return answer;
}

// A value that processes of a test wait for.
void await(const int& value, int wanted) {
  while (__atomic_load_n(&value, __ATOMIC_SEQ_CST) < wanted) usleep(1000);
}
void set(int& value, int to) { __atomic_store_n(&value, to, __ATOMIC_SEQ_CST); }

TEST(TwoRuns, AnotherUsersProcessIsNotLetIn) {
  if (getuid() != 0) GTEST_SKIP() << "only root can start processes of two users";
  const SharedArray<int> host(1), knocked(1);
  on_ranks(3, [&](World world) {
    if (world.rank.value == 2) {  // nobody, who knows the name, and speaks as rank 1 would
      await(host[0], 1);
      const std::string name = meeting_place_of(host[0]);
      EXPECT_NE(name, "");
      become(kNobody);
      const Answer answer = knock(name);
      EXPECT_TRUE(answer.connected);
      EXPECT_LE(answer.bytes, 0);
      EXPECT_FALSE(answer.descriptor);
      return set(knocked[0], 1);
    }
    const Launched run = enter_run(world, "visited");
    if (world.rank.value == 0) set(host[0], getpid());
    if (world.rank.value == 1) await(knocked[0], 1);
    const auto communicator = SharedMemory::connect(run.world);
    EXPECT_EQ(communicator->all_gather("here", text(run.world.rank.value)), (std::vector<std::string>{"0", "1"}));
  });
}

// A process of another user that got hold of the place first is not trusted with anything.
TEST(TwoRuns, ASquatterIsNotJoined) {
  if (getuid() != 0) GTEST_SKIP() << "only root can start processes of two users";
  const SharedArray<char> place(128);
  const SharedArray<int> host(1), stage(1);
  on_ranks(3, [&](World world) {
    if (world.rank.value == 2) {
      await(host[0], 1);
      meeting_place_of(host[0]).copy(place.data(), place.size() - 1);
      set(stage[0], 1);
      await(stage[0], 2);  // rank 0 has gone, and with it its hold on the place
      become(kNobody);
      const int squat = socket(AF_UNIX, SOCK_STREAM, 0);
      socklen_t length = 0;
      const sockaddr_un address = address_of(place.data(), length);
      EXPECT_EQ(bind(squat, reinterpret_cast<const sockaddr*>(&address), length), 0) << place.data();
      EXPECT_EQ(listen(squat, 4), 0);
      set(stage[0], 3);
      await(stage[0], 4);
      close(squat);
      return;
    }
    const Launched run = enter_run(world, "squatted");
    if (world.rank.value == 0) {
      setenv("TESSERA_TIMEOUT_MS", "1000", 1);
      set(host[0], getpid());
      refusal<PeerError>([&] { SharedMemory::connect(run.world); });  // the other does not come in time
      await(stage[0], 1);
      return set(stage[0], 2);
    }
    await(stage[0], 3);
    expect_words(refusal<SystemError>([&] { SharedMemory::connect(run.world); }), {"another user's process"});
    set(stage[0], 4);
  });
}

}  // namespace
}  // namespace tessera::test
