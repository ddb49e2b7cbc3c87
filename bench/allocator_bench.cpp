// What one block costs: from the arena while warm, with new pages, and from libtorch's own allocator.
#include <benchmark/benchmark.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tessera/base/types.h"
#include "tessera/storage/arena.h"
#include "tessera/storage/caching_allocator.h"

namespace tessera {
namespace {

constexpr Bytes kCapacity{int64_t{4} << 30};

std::shared_ptr<Arena> make_arena() {
  const auto size = static_cast<size_t>(kCapacity.value);
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) std::abort();
  std::shared_ptr<const void> mapping(base, [size](const void* at) { munmap(const_cast<void*>(at), size); });
  return std::make_shared<Arena>(static_cast<std::byte*>(base), kCapacity, ArenaOptions{.bound = kCapacity}, mapping);
}

/// Allocates and frees one block; `touch` writes it too.
void allocate_and_free(benchmark::State& state, c10::Allocator* allocator, bool touch) {
  const auto bytes = static_cast<size_t>(state.range(0));
  for (auto _ : state) {
    const at::DataPtr block = allocator->allocate(bytes);
    if (touch) std::memset(block.get(), 1, bytes);
    benchmark::DoNotOptimize(block.get());
  }
}
void BM_Warm(benchmark::State& state, bool touch) {
  CachingAllocator::instance().attach(make_arena());
  allocate_and_free(state, &CachingAllocator::instance(), touch);
  CachingAllocator::instance().detach();
}
void BM_System(benchmark::State& state, bool touch) { allocate_and_free(state, c10::GetDefaultCPUAllocator(), touch); }
BENCHMARK_CAPTURE(BM_Warm, untouched, false)->Arg(1 << 10)->Arg(64 << 10)->Arg(1 << 20)->Arg(25 << 20);
BENCHMARK_CAPTURE(BM_System, untouched, false)->Arg(1 << 10)->Arg(64 << 10)->Arg(1 << 20)->Arg(25 << 20);
BENCHMARK_CAPTURE(BM_Warm, written, true)->Arg(1 << 20)->Arg(25 << 20)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(BM_System, written, true)->Arg(1 << 20)->Arg(25 << 20)->Unit(benchmark::kMicrosecond);

/// Random sizes with `range(0)` other blocks alive and as many holes between them.
void BM_Fragmented(benchmark::State& state) {
  const auto arena = make_arena();
  std::mt19937 random(1);
  const auto any_size = [&] { return Bytes{int64_t{64 << 10} + static_cast<int64_t>(random() % (1 << 20))}; };
  std::vector<std::byte*> blocks(static_cast<size_t>(state.range(0) * 2));
  for (auto& block : blocks) block = arena->allocate(any_size());
  for (size_t i = 0; i < blocks.size(); i += 2) arena->free(blocks[i]);
  for (auto _ : state) {
    auto& block = blocks[random() % static_cast<size_t>(state.range(0)) * 2 + 1];
    arena->free(block);
    block = arena->allocate(any_size());
  }
}
BENCHMARK(BM_Fragmented)->Arg(10)->Arg(100)->Arg(1000);

void BM_NewPages(benchmark::State& state) {
  const auto arena = make_arena();
  const Bytes bytes{state.range(0)};
  for (auto _ : state) {
    std::byte* block = arena->allocate(bytes);
    std::memset(block, 1, static_cast<size_t>(bytes.value));
    arena->free(block);
    arena->trim();
  }
}
BENCHMARK(BM_NewPages)->Arg(1 << 20)->Arg(25 << 20)->Unit(benchmark::kMicrosecond);

/// One call per training step, with `range(0)` MiB idle and warm.
void BM_Age(benchmark::State& state) {
  const auto arena = make_arena();
  const Bytes bytes{state.range(0) << 20};
  for (auto _ : state) {
    arena->free(arena->allocate(bytes));
    arena->age();
  }
}
BENCHMARK(BM_Age)->Arg(128)->Arg(1024)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
