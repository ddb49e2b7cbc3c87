#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tessera/base/types.h"
#include "tessera/storage/free_ranges.h"

namespace tessera {

struct ArenaOptions {
  Bytes bound;              ///< most bytes that blocks and idle warm pages may take together
  bool huge_pages = false;  ///< ask for 2 MiB pages, commit and give back in such units; see `shared_huge_pages_allowed`
  int idle_intervals = 8;   ///< `age` gives back what no block covered for this many whole intervals between its calls
};

struct ArenaStatistics {
  Bytes in_use;  ///< in blocks, each rounded up to whole granules
  Bytes warm;    ///< idle, but still backed by pages: a block placed there costs no page faults
  Bytes peak_in_use;
  Bytes peak_committed;     ///< peak of in_use + warm
  int64_t allocations = 0;  ///< blocks handed out: reuses + faults
  int64_t reuses = 0;       ///< of these, blocks that lay wholly on warm pages
  int64_t faults = 0;       ///< of these, blocks that needed at least one new page
  int64_t trims = 0;        ///< runs of idle pages given back to the system
  int64_t refusals = 0;     ///< requests answered with nullptr
};

/// Blocks in a mapping that the caller made, best a large sparse one (MAP_SHARED of a memfd, or private and anonymous;
/// MAP_NORESERVE). Pages of freed blocks stay warm and are reused; unused ones go back to the system. No torch in here.
///
/// A block takes the lowest free addresses that fit, whatever their last block's size, and freed neighbours merge at once,
/// so that the pages committed stay within a few per cent of the most that was ever in use
/// (docs/decisions/arena-placement.md). Sizes are rounded up to granules of 8 KiB (or a page, if larger): 12.5 % of a block
/// of 64 KiB at worst. Blocks start on a granule. Thread-safe. Bookkeeping lies outside the mapping, about one byte per
/// 1,600 committed.
///
/// Fork: a child shares the pages of a shared mapping with its parent, so in the child the arena is dead: `allocate` returns
/// nullptr, and `free`, `age` and `trim` do nothing. The child can read inherited blocks as long as the parent keeps them.
class Arena {
 public:
  /// Manages [base, base + capacity), of which nothing may be in use. `mapping` is kept alive until the arena is gone.
  /// `base` must lie on a page (2 MiB with huge_pages) boundary. Throws ConfigError for a bound or capacity that can't hold
  /// one granule.
  Arena(std::byte* base, Bytes capacity, const ArenaOptions& options, std::shared_ptr<const void> mapping = nullptr);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// A block of `bytes` > 0, contents undefined; nullptr if it would exceed the bound (after giving idle pages back), if no
  /// free range is large enough, or in a forked child. O(log free ranges), plus one byte of bookkeeping per granule.
  std::byte* allocate(Bytes bytes);

  /// Gives a block of `allocate` back. TESSERA_CHECK that it is one. O(log free ranges).
  void free(std::byte* block);

  /// The owner calls this once per training step: idle pages that no block needed for `idle_intervals` whole steps go back
  /// to the system, so that the cache follows when shapes change. O(idle warm granules).
  void age();

  /// Gives idle pages back, highest addresses first, until at most `keep` stay warm.
  void trim(Bytes keep = Bytes{0});

  /// Lowers the bound to `bound` if that is less. What is in use above it stays; idle pages above it go back.
  void lower_bound_to(Bytes bound);

  bool contains(const void* address) const;
  std::optional<Bytes> offset_of(const void* address) const;  ///< from base; nothing for an address outside

  std::byte* base() const { return base_; }
  Bytes capacity() const { return Bytes{int64_t{granules_} * granule_}; }
  Bytes bound() const;
  bool inherited() const;  ///< is this a forked child of the process that made the arena
  ArenaStatistics statistics() const;
  void reset_peaks();  ///< peaks start again from what is in use and committed now

 private:
  friend class ArenaForkHandlers;
  struct Unmap {
    size_t bytes = 0;
    void operator()(void* memory) const;
  };
  template <class T>
  using Table = std::unique_ptr<T[], Unmap>;  // zero, and not touched before use
  template <class T>
  static Table<T> make_table(uint32_t size);

  GranuleRange whole_units_around(GranuleRange range) const;
  uint32_t cold_in(GranuleRange range) const;
  bool make_room(int64_t fresh);
  void occupy(GranuleRange block, GranuleRange committed, uint32_t fresh);
  std::byte* refuse();
  int64_t give_back(GranuleRange units);
  int64_t give_back_idle(GranuleRange range, uint8_t least_idle, int64_t wanted);
  void trim_to(int64_t keep);
  void lower_touched_end();
  void note_peaks();
  Bytes bytes_of(int64_t granules) const { return Bytes{granules * granule_}; }
  std::byte* address_of(uint32_t granule) const { return base_ + int64_t{granule} * granule_; }

  std::byte* const base_;
  const int64_t granule_;    // bytes
  const uint32_t granules_;  // capacity
  const uint32_t unit_;      // granules that are committed and given back together: 1, or those of a huge page
  const int idle_intervals_;
  const std::shared_ptr<const void> mapping_;
  int give_back_advice_ = 0;

  mutable std::mutex mutex_;
  bool inherited_ = false;
  FreeRanges free_;
  Table<uint32_t> lengths_;   // at a block's first granule: its granules
  Table<uint8_t> idle_;       // 0: cold. 1: in use, or idle since the last age(). +1 with each age() while idle
  uint32_t touched_end_ = 0;  // all granules from here on are cold
  int64_t bound_ = 0, in_use_ = 0, warm_ = 0, peak_in_use_ = 0, peak_committed_ = 0;  // granules
  int64_t reuses_ = 0, faults_ = 0, trims_ = 0, refusals_ = 0;
  std::vector<GranuleRange> scratch_;
};

/// Does this system give 2 MiB pages to shared memory that asks (/sys/kernel/mm/transparent_hugepage/shmem_enabled)?
bool shared_huge_pages_allowed();

}  // namespace tessera
