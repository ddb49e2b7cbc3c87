#include "tessera/storage/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "tessera/base/check.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/storage/arena_fork_handlers.h"

#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>  // its macros do nothing in builds without AddressSanitizer
#else
#define ASAN_POISON_MEMORY_REGION(address, size) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, size) static_cast<void>(0)
#endif

namespace tessera {

namespace {
constexpr int64_t kLeastGranule = int64_t{8} << 10;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr uint8_t kJustUsed = 1;
constexpr int kMostIdleIntervals = 200;  // idle_ counts in a byte

int64_t granule_bytes() { return std::max<int64_t>(kLeastGranule, sysconf(_SC_PAGESIZE)); }

uint32_t granules_in(Bytes capacity, bool huge_pages) {
  const int64_t unit = huge_pages ? kHugePage : granule_bytes();
  const int64_t count = capacity.value / unit * (unit / granule_bytes());
  if (count < 1 || count >= std::numeric_limits<uint32_t>::max())
    throw ConfigError(text("an arena of ", capacity.value, " bytes is not possible; it takes between ", unit,
                           " bytes and 2^32 times ", granule_bytes(), " bytes"));
  return static_cast<uint32_t>(count);
}
}  // namespace

void Arena::Unmap::operator()(void* memory) const { munmap(memory, bytes); }

template <class T>
Arena::Table<T> Arena::make_table(uint32_t size) {
  // Not calloc: once a process has freed such a table, malloc takes the next from its heap, and calloc writes all of it.
  const size_t bytes = size * sizeof(T);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return Table<T>(static_cast<T*>(memory), Unmap{bytes});
}

Arena::Arena(std::byte* base, Bytes capacity, const ArenaOptions& options, std::shared_ptr<const void> mapping)
    : base_(base),
      granule_(granule_bytes()),
      granules_(granules_in(capacity, options.huge_pages)),
      unit_(options.huge_pages ? static_cast<uint32_t>(kHugePage / granule_) : 1),
      idle_intervals_(options.idle_intervals),
      mapping_(std::move(mapping)),
      free_(granules_),
      lengths_(make_table<uint32_t>(granules_)),
      idle_(make_table<uint8_t>(granules_)),
      bound_(options.bound.value / granule_) {
  if (bound_ < 1)
    throw ConfigError(text("an arena's bound of ", options.bound.value, " bytes is less than one granule of ", granule_));
  if (idle_intervals_ < 0 || idle_intervals_ > kMostIdleIntervals)
    throw ConfigError(text("an arena's idle_intervals must lie in 0 … ", kMostIdleIntervals, ", got ", idle_intervals_));
  const int64_t alignment = options.huge_pages ? kHugePage : sysconf(_SC_PAGESIZE);
  TESSERA_CHECK(reinterpret_cast<uintptr_t>(base) % static_cast<uintptr_t>(alignment) == 0,
                "the arena's base is not aligned");
  // Only MADV_REMOVE frees pages of shared memory, and only MADV_DONTNEED those of private memory. The kernel refuses the
  // former for private mappings, which tells them apart. The pages are not in use yet, so trying does no harm.
  give_back_advice_ = madvise(base_, static_cast<size_t>(granule_), MADV_REMOVE) == 0 ? MADV_REMOVE : MADV_DONTNEED;
  // Refused where the kernel has no huge pages; small ones then serve as well.
  if (options.huge_pages) madvise(base_, static_cast<size_t>(this->capacity().value), MADV_HUGEPAGE);
  ArenaForkHandlers::instance().add(this);
}

Arena::~Arena() {
  ArenaForkHandlers::instance().remove(this);
  ASAN_UNPOISON_MEMORY_REGION(base_, static_cast<size_t>(int64_t{touched_end_} * granule_));
}

std::byte* Arena::allocate(Bytes bytes) {
  TESSERA_CHECK(bytes.value > 0, "a block of no bytes");
  const int64_t wanted = (bytes.value + granule_ - 1) / granule_;
  std::lock_guard lock(mutex_);
  if (inherited_) return nullptr;
  if (in_use_ + wanted > bound_ || wanted > granules_)
    return refuse();  // don't empty the cache for what can't be had anyway
  const auto begin = free_.take(static_cast<uint32_t>(wanted));
  if (!begin) return refuse();
  const GranuleRange block{*begin, static_cast<uint32_t>(wanted)};
  const GranuleRange committed = whole_units_around(block);
  const uint32_t fresh = cold_in(committed);
  if (fresh > 0 && !make_room(fresh)) {
    free_.insert(block);
    return refuse();
  }
  occupy(block, committed, fresh);
  return address_of(block.begin);
}

void Arena::free(std::byte* block) {
  std::lock_guard lock(mutex_);
  if (inherited_) return;
  TESSERA_CHECK(contains(block) && (block - base_) % granule_ == 0, "freed an address that is no block of this arena");
  const auto begin = static_cast<uint32_t>((block - base_) / granule_);
  const uint32_t count = std::exchange(lengths_[begin], 0);
  TESSERA_CHECK(count > 0, "freed an address where no block of the arena begins, or a block twice");
  in_use_ -= count;
  warm_ += count;
  free_.insert({begin, count});
  ASAN_POISON_MEMORY_REGION(block, static_cast<size_t>(bytes_of(count).value));
}

void Arena::age() {
  std::lock_guard lock(mutex_);
  if (inherited_) return;
  const auto stale = static_cast<uint8_t>(kJustUsed + idle_intervals_ + 1);
  free_.list(scratch_);
  for (const GranuleRange range : scratch_) {
    const uint32_t end = std::min(range.end(), touched_end_);
    for (uint32_t granule = range.begin; granule < end; ++granule)
      if (idle_[granule] != 0 && idle_[granule] < stale) ++idle_[granule];
    give_back_idle(range, stale, range.count);
  }
  lower_touched_end();
}

void Arena::trim(Bytes keep) {
  std::lock_guard lock(mutex_);
  if (!inherited_) trim_to(keep.value / granule_);
}

void Arena::lower_bound_to(Bytes bound) {
  std::lock_guard lock(mutex_);
  bound_ = std::min(bound_, bound.value / granule_);
  if (!inherited_) trim_to(std::max<int64_t>(0, bound_ - in_use_));
}

bool Arena::contains(const void* address) const {
  const auto distance =
      reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base_);  // wraps to a huge one below base
  return distance < static_cast<uintptr_t>(capacity().value);
}

std::optional<Bytes> Arena::offset_of(const void* address) const {
  if (!contains(address)) return std::nullopt;
  return Bytes{static_cast<const std::byte*>(address) - base_};
}

Bytes Arena::bound() const {
  std::lock_guard lock(mutex_);
  return bytes_of(bound_);
}
bool Arena::inherited() const {
  std::lock_guard lock(mutex_);
  return inherited_;
}

ArenaStatistics Arena::statistics() const {
  std::lock_guard lock(mutex_);
  return {.in_use = bytes_of(in_use_),
          .warm = bytes_of(warm_),
          .peak_in_use = bytes_of(peak_in_use_),
          .peak_committed = bytes_of(peak_committed_),
          .allocations = reuses_ + faults_,
          .reuses = reuses_,
          .faults = faults_,
          .trims = trims_,
          .refusals = refusals_};
}

void Arena::reset_peaks() {
  std::lock_guard lock(mutex_);
  peak_in_use_ = peak_committed_ = 0;
  note_peaks();
}

GranuleRange Arena::whole_units_around(GranuleRange range) const {
  const uint32_t begin = range.begin / unit_ * unit_;
  return {begin, (range.end() + unit_ - 1) / unit_ * unit_ - begin};
}

uint32_t Arena::cold_in(GranuleRange range) const {
  const uint8_t* idle = idle_.get() + range.begin;
  if (std::memchr(idle, 0, range.count) == nullptr) return 0;  // the common case, vectorised by every C library
  return static_cast<uint32_t>(std::count(idle, idle + range.count, 0));
}

bool Arena::make_room(int64_t fresh) {
  const int64_t excess = in_use_ + warm_ + fresh - bound_;
  if (excess > 0) trim_to(std::max<int64_t>(0, warm_ - excess));
  return in_use_ + warm_ + fresh <= bound_;
}

void Arena::occupy(GranuleRange block, GranuleRange committed, uint32_t fresh) {
  if (fresh > 0) {  // a huge page's fault also backs neighbours of the block: they are idle and warm from now on
    for (uint32_t granule = committed.begin; granule < committed.end(); ++granule)
      idle_[granule] = std::max(idle_[granule], kJustUsed);
    touched_end_ = std::max(touched_end_, committed.end());
  }
  ++(fresh > 0 ? faults_ : reuses_);
  std::memset(idle_.get() + block.begin, kJustUsed, block.count);
  lengths_[block.begin] = block.count;
  in_use_ += block.count;
  warm_ += int64_t{fresh} - block.count;
  note_peaks();
  ASAN_UNPOISON_MEMORY_REGION(address_of(block.begin), static_cast<size_t>(bytes_of(block.count).value));
}

std::byte* Arena::refuse() {
  ++refusals_;
  return nullptr;
}

/// Gives the pages of `units` (free, warm, whole units) back. Returns the granules given back: none if the system refuses.
int64_t Arena::give_back(GranuleRange units) {
  if (madvise(address_of(units.begin), static_cast<size_t>(bytes_of(units.count).value), give_back_advice_) != 0) return 0;
  std::memset(idle_.get() + units.begin, 0, units.count);
  warm_ -= units.count;
  ++trims_;
  return units.count;
}

/// Gives back at least `wanted` granules of the free `range`, from its end down, in runs of whole units idle for
/// `least_idle` or more. Fewer if there are no more. Returns how many.
int64_t Arena::give_back_idle(GranuleRange range, uint8_t least_idle, int64_t wanted) {
  const uint32_t first = (range.begin + unit_ - 1) / unit_ * unit_;
  uint32_t end = std::min(range.end(), touched_end_) / unit_ * unit_;
  const auto is_idle = [&](uint32_t unit) {
    return std::all_of(idle_.get() + unit, idle_.get() + unit + unit_, [&](uint8_t idle) { return idle >= least_idle; });
  };
  int64_t given = 0;
  while (given < wanted && end > first) {
    uint32_t begin = end;
    while (begin > first && given + (end - begin) < wanted && is_idle(begin - unit_)) begin -= unit_;
    if (begin < end) given += give_back({begin, end - begin});
    end = begin < end ? begin : end - unit_;
  }
  return given;
}

void Arena::trim_to(int64_t keep) {
  if (warm_ <= keep) return;
  free_.list(scratch_);
  for (auto range = scratch_.rbegin(); range != scratch_.rend() && warm_ > keep; ++range)
    give_back_idle(*range, kJustUsed, warm_ - keep);
  lower_touched_end();
}

/// Keeps age() from looking at cold granules beyond the last warm one.
void Arena::lower_touched_end() {
  if (scratch_.empty() || scratch_.back().end() != granules_) return;
  while (touched_end_ > scratch_.back().begin && idle_[touched_end_ - 1] == 0) --touched_end_;
}

void Arena::note_peaks() {
  peak_in_use_ = std::max(peak_in_use_, in_use_);
  peak_committed_ = std::max(peak_committed_, in_use_ + warm_);
}

bool shared_huge_pages_allowed() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string setting;
  std::getline(file, setting);
  return !setting.empty() && setting.find("[never]") == std::string::npos && setting.find("[deny]") == std::string::npos;
}

}  // namespace tessera
