#include "tessera/comm/communicator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
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
using std::chrono::milliseconds;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
void sleep_ms(int64_t count) { std::this_thread::sleep_for(milliseconds(count)); }
void set_timeout_ms(const char* value) { setenv("TESSERA_TIMEOUT_MS", value, 1); }

void expect_fine(const std::vector<RankEnd>& ends, std::initializer_list<size_t> ranks) {
  for (const size_t rank : ranks) {
    EXPECT_EQ(ends.at(rank).signal, 0) << "rank " << rank;
    EXPECT_EQ(ends.at(rank).exit_code, 0) << "rank " << rank << ": " << ends.at(rank).error;
  }
}

std::string message_of(int rank, size_t length) {
  std::string message(length, '\0');
  for (size_t i = 0; i < length; ++i) message[i] = static_cast<char>(rank * 31 + static_cast<int>(i * 7 + length));
  return message;
}

// ---- collectives ------------------------------------------------------------------------------------------------------

TEST(Communicator, MessagesOfAnyAndOfDifferentLengths) {
  for (const int ranks : {1, 2, 3, 5})
    on_ranks(ranks, [](World world) {
      const auto communicator = SharedMemory::connect(world);
      EXPECT_EQ(communicator->rank(), world.rank);
      EXPECT_EQ(communicator->size(), world.size);
      // Around where a message takes one part more (8,064 bytes, of which the first has 8 for the length), and far beyond.
      const std::vector<size_t> lengths = {0, 1, 200, 8055, 8056, 8057, 8064, 16120, 16121, 100'000};
      for (size_t i = 0; i < lengths.size(); ++i) {
        const auto length = [&](int rank) { return lengths[(i + static_cast<size_t>(rank) * 3) % lengths.size()]; };
        const auto messages = communicator->all_gather("lengths", message_of(world.rank.value, length(world.rank.value)));
        ASSERT_EQ(messages.size(), static_cast<size_t>(world.size));
        for (int r = 0; r < world.size; ++r)
          EXPECT_EQ(messages[static_cast<size_t>(r)], message_of(r, length(r))) << "rank " << r;
      }
    });
}

TEST(Communicator, AFasterRankOverwritesNothing) {
  on_ranks(3, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    for (int round = 0; round < 200; ++round) {
      if (round % 50 == world.rank.value) sleep_ms(5);
      const auto messages = communicator->all_gather("round", std::to_string(round * 10 + world.rank.value));
      for (int r = 0; r < world.size; ++r) ASSERT_EQ(messages[static_cast<size_t>(r)], std::to_string(round * 10 + r));
    }
  });
}

TEST(Communicator, DifferentCollectivesAreAnErrorOnAllRanks) {
  on_ranks(3, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    communicator->barrier("start");
    const auto start = Clock::now();
    const std::string words =
        refusal<AgreementError>([&] { communicator->barrier(world.rank.value == 2 ? "save" : "optimizer step 7"); });
    expect_words(words, {"'save'", "'optimizer step 7'", "rank 2", text("rank ", world.rank.value)});
    EXPECT_LT(since(start), 1.0);
  });
}

TEST(Communicator, ConnectsAgainAfterTheLastUserIsGone) {
  on_ranks(2, [](World world) {
    for (int time = 0; time < 3; ++time) {
      const auto communicator = SharedMemory::connect(world);
      EXPECT_EQ(SharedMemory::connect(world), communicator);
      EXPECT_EQ(communicator->all_gather("time", std::to_string(time))[1], std::to_string(time));
    }
  });
}

// ---- one-sided --------------------------------------------------------------------------------------------------------

TEST(Communicator, AWindowShowsWhatItsOwnersPublished) {
  for (const bool one : {true, false})
    on_ranks(3, [&](World world) {
      const auto communicator = SharedMemory::connect(world);
      constexpr int kChunk = 16;
      const auto window = communicator->parameter_window(
          "unit", Bytes(world.size * kChunk * 4),
          one ? one_copy(world.size) : copy_each(world.size, world.rank, world.size * kChunk * 4));
      auto* values = reinterpret_cast<int32_t*>(window->data());
      for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
        const auto value = [&](int rank, int i) { return static_cast<int32_t>(epoch) * 1000 + rank * 100 + i; };
        if (static_cast<int>(epoch) % world.size == world.rank.value) sleep_ms(30);
        for (int i = 0; i < kChunk; ++i) values[world.rank.value * kChunk + i] = value(world.rank.value, i);
        window->publish(epoch);
        window->gather(epoch, "unit", 1);
        for (int r = 0; r < world.size; ++r)
          for (int i = 0; i < kChunk; ++i)
            ASSERT_EQ(values[r * kChunk + i], value(r, i)) << "epoch " << epoch << ", rank " << r;
        communicator->barrier("read");
      }
    });
}

TEST(Communicator, ReplicasAreTheirRanksOwn) {
  on_ranks(2, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    const auto window = communicator->parameter_window("unit", Bytes(128), copy_each(world.size, world.rank, 128));
    window->data()[5] = std::byte{static_cast<unsigned char>(world.rank.value + 1)};
    communicator->barrier("written");
    EXPECT_EQ(window->data()[5], std::byte{static_cast<unsigned char>(world.rank.value + 1)});
  });
}

TEST(Communicator, GradientsAreReadWhereTheyLie) {
  on_ranks(3, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    const auto exchange = communicator->gradient_exchange("unit", 2);
    const auto mine = communicator->peer_readable("gradients", Bytes(64));
    EXPECT_TRUE(communicator->peers_can_read(mine.get()));
    int on_stack = 0;
    EXPECT_FALSE(communicator->peers_can_read(&on_stack));
    for (uint32_t round = 1; round <= 4; ++round) {
      const auto value = [&](int rank) { return static_cast<unsigned char>(round * 10 + static_cast<uint32_t>(rank)); };
      *mine = std::byte{value(world.rank.value)};
      exchange->offer(0, mine.get());
      exchange->offer(1, static_cast<int>(round) % world.size == world.rank.value ? nullptr : mine.get() + 8);
      exchange->post(round);
      exchange->wait_posted(round, "unit", round);
      for (int r = 0; r < world.size; ++r) {
        EXPECT_TRUE(exchange->posted(Rank(r), round));
        EXPECT_EQ(*static_cast<const std::byte*>(exchange->gradient(Rank(r), 0)), std::byte{value(r)})
            << "round " << round << ", rank " << r;
        EXPECT_EQ(exchange->gradient(Rank(r), 1) == nullptr, static_cast<int>(round) % world.size == r);
      }
      exchange->finish(round);
      exchange->wait_finished(round, "unit", round);
    }
  });
}

TEST(Communicator, APeersMemoryCanBeCopied) {
  on_ranks(2, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    const auto mine = communicator->peer_readable("values", Bytes(4096));
    std::memset(mine.get(), world.rank.value + 1, 4096);
    const auto offsets = communicator->all_gather("offsets", std::to_string(communicator->offset_of(mine.get())));
    for (int r = 0; r < world.size; ++r) {
      std::string copy(4096, '\0');
      communicator->read_peer(Rank(r), std::stoll(offsets[static_cast<size_t>(r)]), copy.data(), Bytes(4096));
      EXPECT_EQ(copy, std::string(4096, static_cast<char>(r + 1)));
    }
    communicator->barrier("read");
  });
}

TEST(Communicator, DifferentObjectsAreAnError) {
  const auto ends = run_ranks(2, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    communicator->barrier("start");
    const auto window =
        communicator->parameter_window(world.rank.value == 0 ? "blocks.0" : "blocks.1", Bytes(256), one_copy(world.size));
    window->gather(1, "blocks", 1);
  });
  std::string all;
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 3);
    all += end.error + "\n";
  }
  expect_words(all, {"allocates blocks.", "bytes", "the same model in the same order"});
}

// Ranks that each miss something of the other go on instead of waiting.
TEST(Communicator, APoliteWaitEndsWhenThePeersWaitToo) {
  on_ranks(2, [](World world) {
    const auto communicator = SharedMemory::connect(world);
    const auto a = communicator->gradient_exchange("a", 1), b = communicator->gradient_exchange("b", 1);
    const auto& [mine, theirs] = world.rank.value == 0 ? std::pair(a.get(), b.get()) : std::pair(b.get(), a.get());
    const auto start = Clock::now();
    mine->post(1);
    mine->wait_posted_politely(1, "mine", 1);
    theirs->post(1);
    mine->wait_posted(1, "mine", 1);
    theirs->wait_posted(1, "theirs", 1);
    EXPECT_LT(since(start), 1.0);
  });
}

// ---- the start of a run
// ---------------------------------------------------------------------------------------------------

TEST(CommunicatorStart, RanksThatDoNotComeAreNamed) {
  on_ranks(4, [](World world) {
    set_timeout_ms("400");
    if (world.rank.value == 1 || world.rank.value == 3) return;
    const std::string words = refusal<PeerError>([&] { SharedMemory::connect(world); });
    if (world.rank.value == 0) expect_words(words, {"local ranks 1, 3 of 4"});
  });
}

TEST(CommunicatorStart, AMissingFirstRankIsNamed) {
  on_ranks(2, [](World world) {
    set_timeout_ms("400");
    if (world.rank.value == 1)
      expect_words(refusal<PeerError>([&] { SharedMemory::connect(world); }), {"local rank 0 did not come"});
  });
}

TEST(CommunicatorStart, TwoProcessesWithOneRankAreAnError) {
  const auto ends = run_ranks(3, [](World world) {
    set_timeout_ms("2000");
    if (world.rank.value == 0)
      return expect_words(refusal<AgreementError>([&] { SharedMemory::connect(world); }),
                          {"two processes joined as local rank 1"});
    world.rank = world.local_rank = Rank(1);
    SharedMemory::connect(world);
  });
  expect_fine(ends, {0});
}

TEST(CommunicatorStart, ASecondRunOfTheSameNameIsRefused) {
  const auto ends = run_ranks(2, [](World world) {
    set_timeout_ms("1500");
    world.local_rank = world.rank = Rank(0);  // each is rank 0 of the same run, whose rank 1 never comes
    SharedMemory::connect(world);
  });
  const bool swapped = ends[0].error.find("MASTER_PORT") == std::string::npos;
  expect_words(ends[swapped ? 1 : 0].error, {"another run with the same launcher identity", "MASTER_PORT"});
  expect_words(ends[swapped ? 0 : 1].error, {"local ranks 1 of 2"});
}

TEST(CommunicatorStart, RanksOnOtherHostsAreRefused) {
  World world{.rank = Rank(0), .size = 4, .local_rank = Rank(0), .local_size = 2, .run = "here and there"};
  expect_words(refusal<ConfigError>([&] { SharedMemory::connect(world); }), {"4 ranks", "only 2 on this host"});
}

int open_sockets() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    count += std::filesystem::read_symlink(entry.path(), gone).string().starts_with("socket:") ? 1 : 0;
  }
  return count;
}

// Nobody can come in later: where the ranks met is gone as soon as all have.
TEST(CommunicatorStart, LeavesNoSocket) {
  on_ranks(2, [](World world) {
    const int before = open_sockets();
    const auto communicator = SharedMemory::connect(world);
    EXPECT_EQ(open_sockets(), before);
  });
}

}  // namespace
}  // namespace tessera::test
