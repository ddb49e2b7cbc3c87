#include "tessera/storage/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/check.h"
#include "tessera/base/error.h"
#include "tessera/base/types.h"

namespace tessera {
namespace {

constexpr Bytes kKiB{1024}, kMiB{1024 * 1024};
constexpr Bytes kCapacity = kMiB * 256;

enum class Sharing { kShared, kPrivate };

std::byte* map(Bytes capacity, Sharing sharing) {
  const auto size = static_cast<size_t>(capacity.value);
  int file = -1;
  if (sharing == Sharing::kShared) {
    file = memfd_create("arena_test", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, capacity.value) != 0) throw SystemError("memfd_create or ftruncate failed");
  }
  const int flags = MAP_NORESERVE | (sharing == Sharing::kShared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
  void* base = mmap(nullptr, size + (size_t{2} << 20), PROT_READ | PROT_WRITE, flags, file, 0);
  if (file >= 0) close(file);
  if (base == MAP_FAILED) throw SystemError("mmap failed");
  return static_cast<std::byte*>(base);
}

/// An arena over a mapping of its own.
struct TestArena {
  explicit TestArena(ArenaOptions options = {.bound = kCapacity}, Sharing sharing = Sharing::kShared)
      : memory(map(kCapacity, sharing)), arena(memory, kCapacity, options) {}
  ~TestArena() { munmap(memory, static_cast<size_t>(kCapacity.value) + (size_t{2} << 20)); }
  Arena* operator->() { return &arena; }
  std::byte* touched(Bytes bytes) {
    std::byte* block = arena.allocate(bytes);
    if (block != nullptr) std::memset(block, 1, static_cast<size_t>(bytes.value));
    return block;
  }
  std::byte* memory;
  Arena arena;
};

/// Memory of this process that is backed by pages now, from the kernel's own count of [base, base + capacity).
Bytes backed(const Arena& arena) {
  const auto pages = static_cast<size_t>(arena.capacity().value / sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident(pages);
  if (mincore(arena.base(), static_cast<size_t>(arena.capacity().value), resident.data()) != 0)
    throw SystemError("mincore failed");
  return Bytes{std::count_if(resident.begin(), resident.end(), [](unsigned char page) { return page & 1; }) *
               sysconf(_SC_PAGESIZE)};
}

Bytes resident_set() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return Bytes{resident * sysconf(_SC_PAGESIZE)};
}

TEST(Arena, ReusesWarmPages) {
  TestArena arena;
  std::byte* first = arena.touched(kMiB);
  EXPECT_EQ(first, arena->base());
  arena->free(first);
  EXPECT_EQ(arena->statistics().warm, kMiB);
  EXPECT_EQ(arena.touched(kMiB), first);
  const auto statistics = arena->statistics();
  EXPECT_EQ(statistics.in_use, kMiB);
  EXPECT_EQ(statistics.warm, Bytes{0});
  EXPECT_EQ(statistics.allocations, 2);
  EXPECT_EQ(statistics.faults, 1);
  EXPECT_EQ(statistics.reuses, 1);
}

TEST(Arena, AsksForNoMoreThanAnEighthTooMuch) {
  TestArena arena;
  for (int64_t bytes = 64 << 10; bytes < int64_t{40} << 20; bytes += bytes / 7 + 1) {
    std::byte* block = arena->allocate(Bytes{bytes});
    EXPECT_LE(arena->statistics().in_use.value, bytes + bytes / 8) << bytes;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 4096, 0u);
    arena->free(block);
  }
}

TEST(Arena, CoalescesSoThatOneLargeBlockFitsWhereManySmallWere) {
  TestArena arena;
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(arena.touched(kMiB));
  for (int i : {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15}) arena->free(blocks[static_cast<size_t>(i)]);
  EXPECT_EQ(arena.touched(kMiB * 16), arena->base());
  EXPECT_EQ(arena->statistics().faults, 16);  // none for the large one
  EXPECT_EQ(backed(arena.arena), kMiB * 16);
}

TEST(Arena, BoundHoldsForUsedAndWarmTogether) {
  TestArena arena({.bound = kMiB * 16});
  std::byte* low = arena.touched(kMiB * 4);
  std::byte* high = arena.touched(kMiB * 10);
  arena->free(low);
  std::byte* larger = arena.touched(kMiB * 6);  // does not fit where `low` was: that goes back
  ASSERT_NE(larger, nullptr);
  EXPECT_EQ(arena->statistics().in_use, kMiB * 16);
  EXPECT_EQ(arena->statistics().warm, Bytes{0});
  EXPECT_EQ(backed(arena.arena), kMiB * 16);
  EXPECT_EQ(arena->allocate(kMiB), nullptr);
  EXPECT_EQ(arena->statistics().refusals, 1);
  EXPECT_EQ(arena->statistics().peak_committed, kMiB * 16);
  EXPECT_EQ(high[kMiB.value * 10 - 1], std::byte{1});
  arena->free(high);
  EXPECT_EQ(arena->allocate(kMiB * 11), nullptr);  // can't be had: the cache stays
  EXPECT_EQ(arena->statistics().warm, kMiB * 10);
  arena->lower_bound_to(kMiB * 8);
  EXPECT_EQ(arena->statistics().warm, kMiB * 2);
  arena->lower_bound_to(kMiB * 100);
  EXPECT_EQ(arena->bound(), kMiB * 8);
}

TEST(Arena, RefusesWhatDoesNotFitTheMapping) {
  TestArena arena({.bound = kCapacity * 4});
  EXPECT_EQ(arena->allocate(kCapacity + kKiB), nullptr);
  std::byte* all = arena->allocate(kCapacity);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(arena->allocate(kKiB), nullptr);
  arena->free(all);
  EXPECT_NE(arena->allocate(kKiB), nullptr);
}

class ArenaOverBoth : public testing::TestWithParam<Sharing> {};

TEST_P(ArenaOverBoth, TrimGivesPagesBackToTheSystem) {
  TestArena arena({.bound = kCapacity}, GetParam());
  std::vector<std::byte*> blocks;
  const Bytes before = resident_set();
  for (int i = 0; i < 64; ++i) blocks.push_back(arena.touched(kMiB));
  const Bytes full = resident_set();
  EXPECT_GT(full, before + kMiB * 60);
  for (int i = 0; i < 64; ++i)
    if (i % 4 != 0) arena->free(blocks[static_cast<size_t>(i)]);
  EXPECT_EQ(arena->statistics().warm, kMiB * 48);
  arena->trim(kMiB * 8);
  EXPECT_EQ(arena->statistics().warm, kMiB * 8);
  EXPECT_EQ(backed(arena.arena), kMiB * 24);
  EXPECT_LT(resident_set(), full - kMiB * 36);
  arena->trim();
  EXPECT_EQ(arena->statistics().warm, Bytes{0});
  EXPECT_EQ(backed(arena.arena), kMiB * 16);
  for (int i = 0; i < 64; i += 4) EXPECT_EQ(blocks[static_cast<size_t>(i)][12345], std::byte{1});
  std::byte* again = arena.touched(kMiB);  // a block over pages that went back
  EXPECT_EQ(again, blocks[1]);
}
INSTANTIATE_TEST_SUITE_P(Arena, ArenaOverBoth, testing::Values(Sharing::kShared, Sharing::kPrivate),
                         [](const auto& info) { return info.param == Sharing::kShared ? "Shared" : "Private"; });

TEST(Arena, AgeGivesBackWhatNoStepNeeds) {
  TestArena arena({.bound = kCapacity, .idle_intervals = 2});
  const auto step = [&](Bytes bytes) {
    std::byte* block = arena.touched(bytes);
    arena->free(block);
    arena->age();
  };
  for (int i = 0; i < 5; ++i) step(kMiB * 32);
  EXPECT_EQ(arena->statistics().warm, kMiB * 32);
  EXPECT_EQ(arena->statistics().faults, 1);
  EXPECT_EQ(arena->statistics().trims, 0);
  step(kMiB * 8);  // shapes change
  EXPECT_EQ(arena->statistics().warm, kMiB * 32);
  step(kMiB * 8);
  EXPECT_EQ(arena->statistics().warm, kMiB * 8);
  EXPECT_EQ(backed(arena.arena), kMiB * 8);
  for (int i = 0; i < 5; ++i) step(kMiB * 8);
  EXPECT_EQ(arena->statistics().faults, 1);
}

TEST(Arena, PeaksCanStartAgain) {
  TestArena arena;
  arena->free(arena.touched(kMiB * 32));
  arena->trim();
  arena->reset_peaks();
  arena->free(arena.touched(kMiB * 2));
  EXPECT_EQ(arena->statistics().peak_in_use, kMiB * 2);
  EXPECT_EQ(arena->statistics().peak_committed, kMiB * 2);
}

TEST(Arena, HugePagesAreCommittedAndGivenBackWhole) {
  const auto memory = map(kCapacity, Sharing::kShared);
  const uintptr_t huge = uintptr_t{2} << 20;
  auto* base = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory) + huge - 1) / huge * huge);
  Arena arena(base, kCapacity, {.bound = kMiB * 8, .huge_pages = true});
  std::byte* small = arena.allocate(kKiB * 64);
  EXPECT_EQ(arena.statistics().in_use + arena.statistics().warm, kMiB * 2);
  std::byte* across = arena.allocate(kMiB * 2);
  EXPECT_EQ(arena.statistics().in_use + arena.statistics().warm, kMiB * 4);
  arena.trim();  // nothing: both huge pages are partly in use
  EXPECT_EQ(arena.statistics().in_use + arena.statistics().warm, kMiB * 4);
  arena.free(small);
  arena.trim();
  EXPECT_EQ(arena.statistics().in_use + arena.statistics().warm, kMiB * 4);
  arena.free(across);
  arena.trim();
  EXPECT_EQ(arena.statistics().warm, Bytes{0});
  EXPECT_EQ(arena.allocate(kMiB * 9), nullptr);
  EXPECT_NE(arena.allocate(kMiB * 8), nullptr);
  munmap(memory, static_cast<size_t>(kCapacity.value) + huge);
}

TEST(Arena, KnowsItsAddresses) {
  TestArena arena;
  arena->allocate(kMiB);
  std::byte* second = arena->allocate(kMiB);
  EXPECT_EQ(arena->offset_of(second + 5), kMiB + Bytes{5});
  EXPECT_FALSE(arena->offset_of(arena->base() - 1));
  EXPECT_FALSE(arena->offset_of(arena->base() + kCapacity.value));
  EXPECT_FALSE(arena->offset_of(nullptr));
  EXPECT_TRUE(arena->contains(arena->base() + kCapacity.value - 1));
}

TEST(Arena, FindsFaultsOfItsCaller) {
  TestArena arena;
  std::byte* block = arena->allocate(kMiB);
  arena->allocate(kMiB);
  EXPECT_THROW(arena->free(block + 64), InternalError);
  EXPECT_THROW(arena->free(block + 8192), InternalError);
  arena->free(block);
  EXPECT_THROW(arena->free(block), InternalError);
  EXPECT_THROW(arena->allocate(Bytes{0}), InternalError);
  EXPECT_THROW(Arena(block, kMiB, {.bound = Bytes{100}}), ConfigError);
  EXPECT_THROW(Arena(block, Bytes{100}, {.bound = kMiB}), ConfigError);
}

TEST(Arena, KeepsTheMappingAlive) {
  auto mapping = std::make_shared<int>(1);
  TestArena memory;
  auto arena = std::make_unique<Arena>(memory.memory, kCapacity, ArenaOptions{.bound = kCapacity}, mapping);
  std::weak_ptr<int> watch = std::exchange(mapping, nullptr);
  EXPECT_FALSE(watch.expired());
  arena.reset();
  EXPECT_TRUE(watch.expired());
}

TEST(Arena, ThreadsNeverShareABlock) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  TestArena arena({.bound = kMiB * 48});
  std::atomic<int> damaged{0};
  const auto hammer = [&](unsigned thread) {
    std::mt19937 random(seed + thread);
    std::vector<std::pair<std::byte*, size_t>> blocks;
    const auto release = [&](std::pair<std::byte*, size_t> block) {
      for (size_t at : {size_t{0}, block.second / 2, block.second - 1})
        if (block.first[at] != static_cast<std::byte>(thread + 1)) ++damaged;
      arena->free(block.first);
    };
    for (int i = 0; i < 3000; ++i) {
      const size_t size = (size_t{64} << 10) + random() % (size_t{2} << 20);
      if (std::byte* block = arena->allocate(Bytes{static_cast<int64_t>(size)})) {
        for (size_t at : {size_t{0}, size / 2, size - 1}) block[at] = static_cast<std::byte>(thread + 1);
        blocks.emplace_back(block, size);
      }
      if (!blocks.empty() && (random() % 2 == 0 || blocks.size() > 8)) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        release(blocks.back());
        blocks.pop_back();
      }
      if (random() % 200 == 0) arena->age();
      if (random() % 500 == 0) arena->trim(kMiB * 4);
    }
    for (const auto& block : blocks) release(block);
  };
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) threads.emplace_back(hammer, thread);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(damaged, 0);
  EXPECT_EQ(arena->statistics().in_use, Bytes{0});
  EXPECT_LE(arena->statistics().peak_committed, kMiB * 48);
  arena->trim();
  EXPECT_EQ(backed(arena.arena), Bytes{0});
  EXPECT_EQ(arena->allocate(kMiB * 48), arena->base());  // everything merged again
}

TEST(Arena, AForkedChildLeavesTheParentsPagesAlone) {
  TestArena arena;
  std::byte* lent = arena.touched(kMiB);
  std::byte* idle = arena.touched(kMiB);
  arena->free(idle);
  const pid_t child = fork();
  if (child == 0) {
    const bool dead = arena->inherited() && arena->allocate(kMiB) == nullptr && lent[77] == std::byte{1};
    arena->free(lent);
    arena->free(lent);
    for (int i = 0; i < 5; ++i) arena->age();
    arena->trim();
    _exit(dead ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(backed(arena.arena), kMiB * 2);
  EXPECT_FALSE(arena->inherited());
  EXPECT_EQ(arena->statistics().in_use, kMiB);
  EXPECT_EQ(lent[4321], std::byte{1});
}

TEST(Arena, CanForkWhileOtherThreadsAllocate) {
  TestArena arena;
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) arena->free(arena->allocate(kMiB));
  });
  for (int i = 0; i < 50; ++i) {
    const pid_t child = fork();
    if (child == 0) _exit(arena->allocate(kMiB) == nullptr ? 0 : 1);  // must not wait for a lock that nobody holds
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  stop = true;
  busy.join();
}

}  // namespace
}  // namespace tessera
