#include "tessera/storage/caching_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iomanip>
#include <string>
#include <utility>

#include "tessera/base/check.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/storage/memory_limit.h"

namespace tessera {

namespace {
constexpr uint8_t kPriority = 100;

std::string mebibytes(int64_t bytes) {
  return text(std::fixed, std::setprecision(1), static_cast<double>(bytes) / (1 << 20), " MiB");
}
}  // namespace

CachingAllocator::Region::Region(std::shared_ptr<Arena> from)
    : begin(from->base()), end(begin + from->capacity().value), arena(std::move(from)) {}

bool CachingAllocator::Region::enter() {
  for (int64_t now = users.load(std::memory_order_relaxed); now > 0;)
    if (users.compare_exchange_weak(now, now + 1, std::memory_order_acquire, std::memory_order_relaxed)) return true;
  return false;
}

CachingAllocator& CachingAllocator::instance() {
  static auto* allocator = new CachingAllocator;
  return *allocator;
}

CachingAllocator::CachingAllocator()
    : previous_(c10::GetAllocator(c10::DeviceType::CPU)), previous_deleter_(previous_->raw_deleter()) {
  const int failed = pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                                    [] { instance().after_fork_in_child(); });
  if (failed) throw SystemError(text("can't register fork handlers for the allocator: ", std::strerror(failed)));
}

void CachingAllocator::install() {
  c10::SetCPUAllocator(this, kPriority);
  if (c10::GetAllocator(c10::DeviceType::CPU) != this)
    throw ConfigError(text("libtorch has a CPU allocator of a priority above ", int{kPriority},
                           ", so that Tessera's can't be installed; don't set another one in this process"));
}

void CachingAllocator::attach(std::shared_ptr<Arena> arena) {
  TESSERA_CHECK(arena != nullptr, "no arena to attach");
  if (arena->inherited())
    throw ConfigError("an arena made before fork() can't be attached in the child; make one in the child");
  arena->lower_bound_to(memory_limit());
  Region* before = nullptr;
  {
    std::lock_guard lock(mutex_);
    before = current_.exchange(region_of(arena), std::memory_order_acq_rel);
  }
  if (before != nullptr) leave(*before);
}

void CachingAllocator::detach() {
  Region* before = nullptr;
  {
    std::lock_guard lock(mutex_);
    before = current_.exchange(nullptr, std::memory_order_acq_rel);
  }
  if (before != nullptr) leave(*before);
}

std::shared_ptr<Arena> CachingAllocator::arena() const {
  std::lock_guard lock(mutex_);
  const Region* region = current_.load(std::memory_order_relaxed);
  return region == nullptr ? nullptr : region->arena;
}

at::DataPtr CachingAllocator::allocate(size_t bytes) {
  if (bytes < static_cast<size_t>(kLeastArenaBlock.value)) return from_previous(bytes);
  Region* region = current_.load(std::memory_order_acquire);
  if (region == nullptr || !region->enter()) return from_previous(bytes);
  std::byte* block = region->arena->allocate(Bytes{static_cast<int64_t>(bytes)});
  if (block == nullptr) {
    note_fallback(*region->arena, bytes);
    leave(*region);
    return from_previous(bytes);
  }
  c10::profiledCPUMemoryReporter().New(block, bytes);  // as c10's own CPU allocator does: PyTorch's profiler sees the block
  return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
}

at::DataPtr CachingAllocator::from_previous(size_t bytes) {
  at::DataPtr data = previous_->allocate(bytes);
  // c10::Allocator promises that all blocks carry the one raw deleter. mkldnn relies on it, and frees through today's
  // allocator what it took from yesterday's: hence a deleter that finds out where a block is from.
  if (previous_deleter_ != nullptr) static_cast<void>(data.compare_exchange_deleter(previous_deleter_, &release));
  return data;
}

at::DeleterFnPtr CachingAllocator::raw_deleter() const { return previous_deleter_ == nullptr ? nullptr : &release; }

void CachingAllocator::copy_data(void* to, const void* from, size_t bytes) const { default_copy_data(to, from, bytes); }

void CachingAllocator::release(void* block) {
  CachingAllocator& allocator = instance();
  Region* region = allocator.find(block);
  if (region == nullptr) {
    if (block != nullptr) allocator.previous_deleter_(block);
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(block);
  region->arena->free(static_cast<std::byte*>(block));
  allocator.leave(*region);
}

std::optional<int64_t> CachingAllocator::shared_offset(const void* address) const {
  const Region* region = current_.load(std::memory_order_acquire);
  if (region == nullptr || address < region->begin || address >= region->end) return std::nullopt;
  return static_cast<const std::byte*>(address) - region->begin;
}

AllocatorStatistics CachingAllocator::statistics() const {
  const auto attached = arena();
  return {.arena = attached == nullptr ? ArenaStatistics{} : attached->statistics(),
          .fallbacks = fallbacks_.load(),
          .fallback_bytes = Bytes{fallback_bytes_.load()}};
}

/// The region that `address` lies in. Reads no lock: a block keeps its own region where it is, and of other regions only the
/// range is looked at, which never changes. A region leaves the table before its addresses can be mapped to something else;
/// one that its last user has just left may still be there.
CachingAllocator::Region* CachingAllocator::find(const void* address) const {
  const size_t slots = slots_used_.load(std::memory_order_acquire);
  for (size_t i = 0; i < slots; ++i) {
    Region* region = regions_[i].load(std::memory_order_acquire);
    if (region != nullptr && address >= region->begin && address < region->end &&
        region->users.load(std::memory_order_acquire) > 0)
      return region;
  }
  return nullptr;
}

/// A region of `arena` with one more user, in the table. An arena attached again keeps its region: an address must have only
/// one.
CachingAllocator::Region* CachingAllocator::region_of(const std::shared_ptr<Arena>& arena) {
  Region* known = find(arena->base());
  if (known != nullptr && known->enter()) {
    TESSERA_CHECK(known->arena == arena, "two arenas over the same addresses");
    return known;
  }
  const auto slot = std::find(regions_.begin(), regions_.end(), nullptr);
  if (slot == regions_.end())
    throw ConfigError(text("tensors of ", regions_.size(),
                           " detached arenas are still alive; free those of earlier runs before attaching another"));
  Region* region = &all_regions_.emplace_back(arena);
  slot->store(region, std::memory_order_release);
  slots_used_.store(std::max(slots_used_.load(), static_cast<size_t>(slot - regions_.begin()) + 1),
                    std::memory_order_release);
  return region;
}

void CachingAllocator::leave(Region& region) {
  if (region.users.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  {
    std::lock_guard lock(mutex_);
    *std::find(regions_.begin(), regions_.end(), &region) = nullptr;
  }
  region.arena.reset();  // after the table, and without the lock: this may unmap the addresses
}

void CachingAllocator::note_fallback(const Arena& arena, size_t bytes) {
  fallbacks_.fetch_add(1, std::memory_order_relaxed);
  fallback_bytes_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  if (told_.exchange(true)) return;
  const std::string line = text(
      "tessera: the arena can't take a tensor of ", mebibytes(static_cast<int64_t>(bytes)), ": ",
      mebibytes(arena.statistics().in_use.value), " of its bound of ", mebibytes(arena.bound().value),
      " are in use. This tensor and further ones come from the system's allocator, which is slower and makes peers copy. "
      "Raise TESSERA_ARENA_BOUND_BYTES or the memory limit, or use smaller batches.\n");
  std::fputs(line.c_str(), stderr);
}

/// The parent's arenas stay where they are, as inherited tensors lie in them, but are out of use: one more user for each, so
/// that the last free of an inherited block does not run the destructor of a mapping that is the parent's.
void CachingAllocator::after_fork_in_child() {
  for (auto& slot : regions_)
    if (Region* region = slot.load(); region != nullptr) region->enter();
  current_.store(nullptr);
  told_.store(false);
  fallbacks_.store(0);
  fallback_bytes_.store(0);
  mutex_.unlock();
}

}  // namespace tessera
