#include "tessera/engine/arena_lease.h"

#include <mutex>

#include "tessera/base/environment.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/storage/caching_allocator.h"
#include "tessera/storage/memory.h"

namespace tessera {
namespace {

// Arenas of all ranks together may take three quarters of what is there now, unless the user says otherwise.
Bytes arena_bound(int local_ranks) {
  constexpr const char* kVariable = "TESSERA_ARENA_BOUND_BYTES";
  const auto bound = environment_integer(kVariable);
  if (bound && *bound <= 0) throw ConfigError(text(kVariable, " must be a positive number of bytes, but is ", *bound));
  return Bytes(bound.value_or(available_memory().value / 4 * 3 / local_ranks));
}

}  // namespace

std::shared_ptr<ArenaLease> ArenaLease::take(const std::shared_ptr<SharedMemory>& communicator) {
  static std::mutex mutex;
  static std::weak_ptr<ArenaLease> lease;
  const std::lock_guard lock(mutex);
  auto existing = lease.lock();
  if (existing && existing->communicator_ == communicator) return existing;
  std::shared_ptr<ArenaLease> made(new ArenaLease(communicator));
  lease = made;
  return made;
}

ArenaLease::ArenaLease(std::shared_ptr<SharedMemory> communicator) : communicator_(std::move(communicator)) {
  const auto& segment = communicator_->segment();
  const Bytes bound = arena_bound(segment->ranks());
  arena_ = std::make_shared<Arena>(segment->arena(segment->rank()), segment->arena_capacity(),
                                   ArenaOptions{.bound = bound, .huge_pages = shared_huge_pages_allowed()}, segment);
  CachingAllocator::instance().install();
  CachingAllocator::instance().attach(arena_);
}

ArenaLease::~ArenaLease() {
  if (CachingAllocator::instance().arena() == arena_) CachingAllocator::instance().detach();
  arena_->trim();
}

}  // namespace tessera
