// Peers that die, stop, leave, fail or wait for something else: every wait for them ends in an error that says which and
// why.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/shared_memory.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/window_plans.h"

namespace tessera::test {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
void sleep_ms(int64_t count) { std::this_thread::sleep_for(std::chrono::milliseconds(count)); }
void set_timeout_ms(const char* value) { setenv("TESSERA_TIMEOUT_MS", value, 1); }

void expect_fine(const std::vector<RankEnd>& ends, std::initializer_list<size_t> ranks) {
  for (const size_t rank : ranks) {
    EXPECT_EQ(ends.at(rank).signal, 0) << "rank " << rank;
    EXPECT_EQ(ends.at(rank).exit_code, 0) << "rank " << rank << ": " << ends.at(rank).error;
  }
}

TEST(FaultsCommunicator, ADeadPeerIsNamedWithinASecond) {
  const auto ends = run_ranks(3, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    const auto processes = communicator->all_gather("processes", std::to_string(getpid()));
    if (world.rank.value == 1) raise(SIGKILL);
    const auto start = Clock::now();
    const std::string words = refusal<PeerError>([&] { communicator->barrier("checkpoint"); });
    EXPECT_LT(since(start), 1.0);
    expect_words(words, {"rank 1", "process " + processes[1], "died", text("rank ", world.rank.value, " waited"),
                         "collective", "checkpoint"});
  });
  EXPECT_EQ(ends[1].signal, SIGKILL);
  expect_fine(ends, {0, 2});
}

TEST(FaultsCommunicator, WhatAPeerDidBeforeItDiedCounts) {
  const auto ends = run_ranks(2, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    const auto window = communicator->parameter_window("unit", Bytes(128), one_copy(world.size));
    window->publish(1);
    communicator->barrier("published");
    if (world.rank.value == 1) {
      window->publish(2);
      raise(SIGKILL);
    }
    sleep_ms(200);
    window->publish(2);
    EXPECT_NO_THROW(window->gather(2, "unit", 4));
    window->publish(3);
    expect_words(refusal<PeerError>([&] { window->gather(3, "unit", 5); }),
                 {"rank 1", "died", "the gather of unit in step 5"});
  });
  expect_fine(ends, {0});
}

TEST(FaultsCommunicator, AStoppedPeerIsNamedAfterTheTimeOut) {
  on_ranks(2, [](World world) {
    set_timeout_ms("600");
    const auto communicator = SharedMemory::connect(world);
    const auto processes = communicator->all_gather("processes", std::to_string(getpid()));
    if (world.rank.value == 1) {
      raise(SIGSTOP);
      communicator->barrier("checkpoint");  // rank 0 did enter this one
      expect_words(refusal<PeerError>([&] { communicator->barrier("next"); }),
                   {"rank 0 failed", "600 ms", "stopped by a signal"});
      return;
    }
    const auto start = Clock::now();
    const std::string words = refusal<PeerError>([&] { communicator->barrier("checkpoint"); });
    EXPECT_GE(since(start), 0.6);
    EXPECT_LT(since(start), 1.6);
    expect_words(words,
                 {"rank 1", "process " + processes[1], "stopped by a signal", "600 ms", "checkpoint", "TESSERA_TIMEOUT_MS"});
    kill(std::stoi(processes[1]), SIGCONT);
  });
}

// A terminal's Ctrl-Z and fg, or a machine with more to do than cores: ranks that wait, and are not run for a while.
TEST(FaultsCommunicator, APeerStoppedWhileItWaitsIsNoStandstill) {
  on_ranks(2, [](World world) {
    set_timeout_ms("10000");
    const auto communicator = SharedMemory::connect(world);
    const auto processes = communicator->all_gather("processes", std::to_string(getpid()));
    std::thread wakes;
    if (world.rank.value == 0) {
      const int peer = std::stoi(processes[1]);
      sleep_ms(300);  // by now it sleeps in "first"
      kill(peer, SIGSTOP);
      wakes = std::thread([peer] {
        sleep_ms(1500);
        kill(peer, SIGCONT);
      });
    }
    EXPECT_NO_THROW({
      communicator->barrier("first");
      communicator->barrier("second");
    });
    if (wakes.joinable()) wakes.join();
  });
}

TEST(FaultsCommunicator, ASlowPeerIsWaitedFor) {
  on_ranks(3, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    if (world.rank.value == 1) sleep_ms(1500);
    EXPECT_NO_THROW(communicator->barrier("slow"));
  });
}

TEST(FaultsCommunicator, APeerThatLeavesIsNamed) {
  on_ranks(2, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    communicator->barrier("last of rank 1");
    if (world.rank.value == 1) return;
    const auto start = Clock::now();
    const std::string words = refusal<PeerError>([&] { communicator->barrier("checkpoint"); });
    EXPECT_LT(since(start), 1.0);
    expect_words(words, {"rank 1", "has ended its part of the run", "checkpoint", "the same number of steps"});
  });
}

TEST(FaultsCommunicator, AFailureReachesThePeers) {
  on_ranks(3, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    communicator->barrier("start");
    if (world.rank.value == 2) return communicator->fail("the disk of the log is full");
    if (world.rank.value == 1) sleep_ms(300);  // it comes when the other has long ended
    const auto start = Clock::now();
    const std::string words = refusal<PeerError>([&] { communicator->barrier("checkpoint"); });
    EXPECT_LT(since(start), 1.0);
    expect_words(words, {"rank 2 failed", "the disk of the log is full", "checkpoint"});
  });
}

TEST(FaultsCommunicator, AVeryLongFailureIsCut) {
  on_ranks(2, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    communicator->barrier("start");
    if (world.rank.value == 1) return communicator->fail(std::string(100'000, 'x'));
    expect_words(refusal<PeerError>([&] { communicator->barrier(std::string(1000, 'y')); }),
                 {"rank 1 failed", "xxx", "yyy"});
  });
}

// Each rank waits for what the other would do next: an error within a second, that says so on both, whoever notices first.
TEST(FaultsCommunicator, RanksThatWaitForEachOtherAreToldBothOperations) {
  on_ranks(2, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    const auto window = communicator->parameter_window("blocks.3", Bytes(128), one_copy(world.size));
    communicator->barrier("start");
    const auto start = Clock::now();
    const std::string words = refusal<AgreementError>([&] {
      if (world.rank.value == 0)
        window->gather(2, "blocks.3", 41);
      else
        communicator->barrier("optimizer step 41");
    });
    EXPECT_LT(since(start), 1.0);
    expect_words(words, {"rank 0", "rank 1", "the gather of blocks.3 in step 41", "optimizer step 41", "the same order"});
  });
}

}  // namespace
}  // namespace tessera::test
