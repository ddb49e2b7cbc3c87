#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "tessera/base/types.h"
#include "tessera/storage/arena.h"

namespace tessera {

/// Tensors of this size and more lie in the arena, where local peers can read them; smaller ones don't.
inline constexpr Bytes kLeastArenaBlock{int64_t{64} << 10};

struct AllocatorStatistics {
  ArenaStatistics arena;  ///< of the arena attached now; zero if there is none
  int64_t fallbacks =
      0;                 ///< blocks that the attached arenas could not give and the system's allocator gave, since the start
  Bytes fallback_bytes;  ///< their sum, alive or not
};

/// libtorch's CPU allocator for a rank: tensors of 64 KiB and more come from an arena over a mapping that the local ranks
/// share (DESIGN, mechanism 4), everything else from the allocator that was there before. Thread-safe, but for `install`.
///
/// When the arena refuses a block (its bound), the block comes from the previous allocator; this is said once per process on
/// stderr, and counted. Such a tensor works like any other, but `shared_offset` is nothing: peers need a copy.
/// After fork(), a child takes new blocks from the previous allocator until it attaches an arena of its own.
class CachingAllocator final : public c10::Allocator {
 public:
  /// The process's one. Never destroyed: tensors in static storage are freed after everything else.
  static CachingAllocator& instance();

  /// Makes libtorch use it, at priority 100; further calls do nothing. Call it before other threads use tensors (libtorch
  /// reads its table of allocators without a lock). Throws ConfigError if an allocator of a higher priority is there.
  void install();

  /// New blocks come from `arena` from now on, whose bound is lowered to what this process's control group allows. Blocks of
  /// an arena attached before stay valid. Throws ConfigError for an arena inherited over a fork, or if 64 arenas still have
  /// blocks.
  void attach(std::shared_ptr<Arena> arena);

  /// New blocks come from the previous allocator. The arena is let go of once its last block is freed.
  void detach();

  /// The arena that new blocks come from; may be null.
  std::shared_ptr<Arena> arena() const;

  at::DataPtr allocate(size_t bytes) override;
  at::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

  /// Where local peers find `address` in the mapping of the attached arena, in bytes from its base; nothing if it is not
  /// there.
  std::optional<int64_t> shared_offset(const void* address) const;
  bool in_arena(const void* address) const { return shared_offset(address).has_value(); }

  AllocatorStatistics statistics() const;

 private:
  /// One attached arena. Never freed (it is small), so that a thread that looks up an address may always read its range.
  struct Region {
    explicit Region(std::shared_ptr<Arena> arena);
    bool enter();  // one more user, unless all have left

    const std::byte* const begin;
    const std::byte* const end;
    std::atomic<int64_t> users{1};  // blocks, and one while attached
    std::shared_ptr<Arena> arena;   // only for users
  };

  CachingAllocator();
  static void release(void* block);
  at::DataPtr from_previous(size_t bytes);
  Region* find(const void* address) const;
  Region* region_of(const std::shared_ptr<Arena>& arena);
  void leave(Region& region);
  void note_fallback(const Arena& arena, size_t bytes);
  void after_fork_in_child();

  c10::Allocator* const previous_;
  const at::DeleterFnPtr previous_deleter_;
  mutable std::mutex mutex_;  // for attach, detach and the last leave; never held while an arena's lock is taken
  std::deque<Region> all_regions_;
  std::atomic<Region*> current_{nullptr};
  std::array<std::atomic<Region*>, 64> regions_{};  // those with users
  std::atomic<size_t> slots_used_{0};               // regions_ is empty from here on
  std::atomic<int64_t> fallbacks_{0}, fallback_bytes_{0};
  std::atomic<bool> told_{false};
};

}  // namespace tessera
