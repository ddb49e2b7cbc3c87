#include "tessera/storage/caching_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/types.h"

namespace tessera {
namespace {

constexpr Bytes kMiB{1 << 20};
constexpr Bytes kCapacity = kMiB * 1024;
constexpr int64_t kLarge = 1 << 18;  // floats in a tensor of 1 MiB

std::shared_ptr<Arena> make_arena(Bytes bound = kCapacity) {
  const auto size = static_cast<size_t>(kCapacity.value);
  const int file = memfd_create("allocator_test", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kCapacity.value) != 0) throw SystemError("memfd_create or ftruncate failed");
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (base == MAP_FAILED) throw SystemError("mmap failed");
  std::shared_ptr<const void> mapping(
      base, [](const void* at) { munmap(const_cast<void*>(at), static_cast<size_t>(kCapacity.value)); });
  return std::make_shared<Arena>(static_cast<std::byte*>(base), kCapacity, ArenaOptions{.bound = bound}, mapping);
}

torch::Tensor freed_at_exit;  // after the fixtures are gone and the arena is detached

class Allocator : public testing::Test {
 protected:
  Allocator() {
    freed_at_exit = torch::Tensor();  // when tests are repeated
    allocator.install();
  }
  ~Allocator() override { allocator.detach(); }
  std::shared_ptr<Arena> attach(Bytes bound = kCapacity) {
    auto arena = make_arena(bound);
    allocator.attach(arena);
    return arena;
  }
  Bytes in_use() const { return allocator.statistics().arena.in_use; }
  bool shared(const torch::Tensor& tensor) const { return allocator.in_arena(tensor.const_data_ptr()); }

  CachingAllocator& allocator = CachingAllocator::instance();
};

TEST_F(Allocator, LargeTensorsLieInTheArenaAndSmallOnesDoNot) {
  const auto before = torch::ones({kLarge});
  const auto arena = attach();
  const auto large = torch::ones({kLarge}), small = torch::ones({1000}), least = torch::empty({1 << 14}),
             below = torch::empty({(1 << 14) - 1});
  EXPECT_FALSE(shared(before));
  EXPECT_TRUE(shared(large));
  EXPECT_TRUE(shared(least));
  EXPECT_FALSE(shared(below));
  EXPECT_FALSE(shared(small));
  EXPECT_FALSE(allocator.in_arena(nullptr));
  EXPECT_EQ(allocator.shared_offset(large.const_data_ptr<float>() + 3),
            static_cast<const std::byte*>(large.const_data_ptr()) - arena->base() + 12);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(large.const_data_ptr()) % 64, 0u);
  EXPECT_EQ(allocator.arena(), arena);
}

TEST_F(Allocator, FreedMemoryIsReused) {
  attach();
  const void* first = torch::ones({kLarge}).const_data_ptr();
  const auto second = torch::ones({kLarge});
  EXPECT_EQ(second.const_data_ptr(), first);
  EXPECT_EQ(allocator.statistics().arena.reuses, 1);
  EXPECT_EQ(in_use(), kMiB);
}

TEST_F(Allocator, EmptyTensorsAndResizing) {
  attach();
  auto tensor = torch::empty({0});
  EXPECT_EQ(tensor.numel(), 0);
  tensor.resize_({1000}).fill_(3);
  EXPECT_FALSE(shared(tensor));
  tensor.resize_({kLarge});  // moves into the arena, with its contents
  EXPECT_TRUE(shared(tensor));
  EXPECT_TRUE(tensor.slice(0, 0, 1000).eq(3).all().item<bool>());
  tensor.fill_(4).resize_({2 * kLarge});
  EXPECT_TRUE(tensor.slice(0, 0, kLarge).eq(4).all().item<bool>());
  EXPECT_EQ(in_use(), kMiB * 2);
  tensor = torch::Tensor();
  EXPECT_EQ(in_use(), Bytes{0});
}

TEST_F(Allocator, TensorsOutliveDetach) {
  auto arena = attach();
  std::weak_ptr<Arena> watch = arena;
  auto kept = torch::full({kLarge}, 7.0f), other = torch::ones({kLarge});
  arena.reset();
  allocator.detach();
  EXPECT_EQ(allocator.arena(), nullptr);
  EXPECT_FALSE(shared(kept));  // no longer where peers look
  EXPECT_FALSE(shared(torch::ones({kLarge})));
  other = torch::Tensor();
  EXPECT_FALSE(watch.expired());
  EXPECT_TRUE(kept.eq(7).all().item<bool>());
  attach();  // another one: each block goes back to its own
  const auto fresh = torch::ones({kLarge});
  kept = torch::Tensor();
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(in_use(), kMiB);
}

TEST_F(Allocator, AnArenaCanBeAttachedAgain) {
  auto arena = make_arena();
  std::weak_ptr<Arena> watch = arena;
  allocator.attach(arena);
  auto first = torch::ones({kLarge});
  allocator.detach();
  allocator.attach(arena);
  allocator.attach(arena);
  auto second = torch::ones({kLarge});
  first = torch::Tensor();
  second = torch::Tensor();
  EXPECT_TRUE(shared(torch::ones({kLarge})));
  allocator.detach();
  EXPECT_EQ(arena->statistics().in_use, Bytes{0});
  arena.reset();
  EXPECT_TRUE(watch.expired());
}

TEST_F(Allocator, SaysWhenTooManyDetachedArenasAreStillUsed) {
  std::vector<torch::Tensor> kept;
  for (int i = 0; i < 64; ++i) {
    attach();
    kept.push_back(torch::ones({kLarge}));
  }
  EXPECT_THROW(attach(), ConfigError);
  kept.erase(kept.begin());
  attach();
  EXPECT_TRUE(shared(torch::ones({kLarge})));
}

TEST_F(Allocator, FallsBackAtTheBound) {
  attach(kMiB * 4);
  const auto before = allocator.statistics();
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < 6; ++i) tensors.push_back(torch::full({kLarge}, static_cast<float>(i)));
  EXPECT_TRUE(shared(tensors[3]));
  EXPECT_FALSE(shared(tensors[4]));
  EXPECT_EQ(allocator.statistics().fallbacks - before.fallbacks, 2);
  EXPECT_EQ(allocator.statistics().fallback_bytes - before.fallback_bytes, kMiB * 2);
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(tensors[static_cast<size_t>(i)].eq(i).all().item<bool>());
  tensors.clear();
  EXPECT_EQ(in_use(), Bytes{0});
  EXPECT_TRUE(shared(torch::ones({kLarge})));
}

TEST_F(Allocator, SaysOnceThatItFallsBack) {
  const auto fall_back = [&] {
    attach(kMiB * 4);
    std::vector<at::DataPtr> blocks;
    for (int i = 0; i < 6; ++i) blocks.push_back(c10::GetAllocator(c10::kCPU)->allocate(1 << 20));
    std::_Exit(0);
  };
  EXPECT_EXIT(fall_back(), testing::ExitedWithCode(0),
              "^tessera: [^\n]* 1\\.0 MiB: 4\\.0 MiB of its bound of 4\\.0 MiB [^\n]*TESSERA_ARENA_BOUND_BYTES[^\n]*\n$");
}

TEST_F(Allocator, RawInterfaceFindsWhereABlockIsFrom) {
  auto* previous = c10::GetDefaultCPUAllocator();
  void* of_previous = previous->raw_allocate(1 << 20);  // as if taken before this allocator was installed
  attach();
  auto* current = c10::GetAllocator(c10::kCPU);
  ASSERT_EQ(current, &allocator);
  void* large = current->raw_allocate(1 << 20);
  void* small = current->raw_allocate(100);
  EXPECT_EQ(in_use(), kMiB);
  EXPECT_EQ(current->allocate(100).get_deleter(), current->raw_deleter());
  EXPECT_EQ(current->allocate(1 << 20).get_deleter(), current->raw_deleter());
  EXPECT_EQ(current->raw_allocate(0), nullptr);
  current->raw_deallocate(large);
  current->raw_deallocate(small);
  current->raw_deallocate(of_previous);
  current->raw_deallocate(nullptr);
  EXPECT_EQ(in_use(), Bytes{0});
}

TEST_F(Allocator, OperatorsThatAllocateTheirOwnWay) {
  torch::manual_seed(0);
  const auto image = torch::randn({4, 16, 64, 64}), kernel = torch::randn({32, 16, 3, 3}), matrix = torch::randn({512, 512});
  const auto run = [&] {
    std::vector<torch::Tensor> results{torch::conv2d(image, kernel), torch::matmul(matrix, matrix.t())};
    results.push_back(torch::matmul(matrix.to(torch::kBFloat16), matrix.to(torch::kBFloat16)).to(torch::kFloat));
    if (at::hasMKLDNN()) results.push_back((image.to_mkldnn().relu()).to_dense());
    auto lazy = at::_lazy_clone(matrix);  // copy on write
    results.push_back(lazy.mul_(2));
    results.push_back(std::get<0>(torch::sort(matrix.view({-1}))));
    return results;
  };
  const auto expected = run();
  attach();
  const auto results = run();
  for (size_t i = 0; i < results.size(); ++i) EXPECT_TRUE(torch::equal(results[i], expected[i])) << i;
}

TEST_F(Allocator, TrainsToTheSameNumbers) {
  const auto train = [] {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 16, 3).padding(1)), torch::nn::BatchNorm2d(16),
                              torch::nn::ReLU(), torch::nn::Flatten(), torch::nn::Linear(16 * 32 * 32, 64),
                              torch::nn::Tanh(), torch::nn::Linear(64, 10));
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
    std::vector<torch::Tensor> result;
    for (int step = 0; step < 5; ++step) {
      const auto loss = torch::cross_entropy_loss(net->forward(torch::randn({8, 3, 32, 32})), torch::randint(10, {8}));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      if (const auto arena = CachingAllocator::instance().arena()) arena->age();
      result.push_back(loss.detach());
    }
    for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().clone());
    return result;
  };
  const auto expected = train();
  attach();
  const auto result = train();
  EXPECT_GT(allocator.statistics().arena.reuses, allocator.statistics().arena.faults);
  ASSERT_EQ(result.size(), expected.size());
  for (size_t i = 0; i < result.size(); ++i) EXPECT_TRUE(torch::equal(result[i], expected[i])) << i;
}

TEST_F(Allocator, ThreadsAllocateWhileArenasComeAndGo) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  auto* current = c10::GetAllocator(c10::kCPU);
  std::atomic<bool> stop{false};
  std::atomic<int> damaged{0};
  const auto hammer = [&](unsigned thread) {
    std::mt19937 random(seed + thread);
    std::vector<std::pair<at::DataPtr, size_t>> blocks;
    while (!stop) {
      const size_t size = random() % 4 == 0 ? 64 + random() % 4096 : (size_t{64} << 10) + random() % (size_t{1} << 19);
      blocks.emplace_back(current->allocate(size), size);
      auto* bytes = static_cast<unsigned char*>(blocks.back().first.get());
      bytes[0] = bytes[size - 1] = static_cast<unsigned char>(thread);
      if (blocks.size() < 6) continue;
      std::swap(blocks[random() % blocks.size()], blocks.back());
      bytes = static_cast<unsigned char*>(blocks.back().first.get());
      if (bytes[0] != thread || bytes[blocks.back().second - 1] != thread) ++damaged;
      blocks.pop_back();
    }
  };
  std::vector<std::thread> threads;
  for (unsigned thread = 1; thread < 5; ++thread) threads.emplace_back(hammer, thread);
  std::vector<std::weak_ptr<Arena>> arenas;
  for (int i = 0; i < 40; ++i) {
    arenas.push_back(attach());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (i % 3 == 0) allocator.detach();
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  allocator.detach();
  EXPECT_EQ(damaged, 0);
  for (const auto& arena : arenas) EXPECT_TRUE(arena.expired());
}

TEST_F(Allocator, ForkedChildrenTakeNothingFromTheParentsArena) {
  at::set_num_threads(1);
  const auto arena = attach();
  auto lent = torch::full({kLarge}, 5.0f);
  const auto child_is_right = [&] {
    if (shared(torch::ones({kLarge})) || allocator.in_arena(lent.const_data_ptr()) || !lent.eq(5).all().item<bool>())
      return 1;
    lent = torch::Tensor();
    bool refused = false;
    try {
      allocator.attach(arena);
    } catch (const ConfigError&) {
      refused = true;
    }
    if (!refused) return 2;
    attach();  // its own
    const auto own = torch::full({kLarge}, 6.0f);
    return shared(own) && own.eq(6).all().item<bool>() && !arena->contains(own.const_data_ptr()) ? 0 : 3;
  };
  const pid_t child = fork();
  if (child == 0) _exit(child_is_right());
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(in_use(), kMiB);
  EXPECT_TRUE(lent.eq(5).all().item<bool>());
  EXPECT_TRUE(shared(torch::ones({kLarge})));
}

TEST_F(Allocator, TheProfilerSeesTheBlocks) {
  struct Report final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* block, int64_t bytes, size_t, size_t, c10::Device) override {
      seen.emplace_back(block, bytes);
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::vector<std::pair<void*, int64_t>> seen;
  };
  attach();
  const auto report = std::make_shared<Report>();
  void* block = nullptr;
  {
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, report);
    block = c10::GetAllocator(c10::kCPU)->allocate(1 << 20).get();
  }
  EXPECT_EQ(report->seen, (std::vector<std::pair<void*, int64_t>>{{block, 1 << 20}, {block, -(1 << 20)}}));
}

TEST_F(Allocator, DoesNotReplaceAnAllocatorOfHigherPriority) {
  const auto install_after_another = [&] {
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 200);
    try {
      allocator.install();
    } catch (const ConfigError&) {
      _exit(7);
    }
    _exit(0);
  };
  EXPECT_EXIT(install_after_another(), testing::ExitedWithCode(7), "");
}

TEST_F(Allocator, TensorsMayLiveUntilTheProcessEnds) {
  attach();
  freed_at_exit = torch::ones({kLarge});
}

}  // namespace
}  // namespace tessera
