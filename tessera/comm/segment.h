#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/types.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/mesh/world.h"

namespace tessera {

/// What a rank is about to wait for, in the words of an error message: "gather", "unit blocks.3", step 41.
struct Operation {
  const char* kind;
  std::string_view what = {};
  int64_t step = 0;
};

struct Control;
struct Stillness;
enum class Presence : uint32_t;
class SharedBlock;

/// Memory that the ranks of one host share, and the means to wait for each other. One sparse memfd, mapped whole at the same
/// layout by all: control blocks, then objects (allocated in the same order by all ranks), then one arena per rank.
/// Untouched pages cost nothing. Nothing of it has a name in a file system: it is gone when the last rank is.
class Segment {
 public:
  /// Meets the other local ranks of `world` (collective). Throws as `meet` does.
  static std::shared_ptr<Segment> join(const World& world, std::chrono::milliseconds timeout);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Rank rank() const { return rank_; }
  int ranks() const { return ranks_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  std::byte* arena(Rank rank) const;  ///< first byte of that rank's arena
  Bytes arena_capacity() const;       ///< address range of one arena
  int64_t offset_of(const void* address) const { return static_cast<const std::byte*>(address) - base_; }
  bool contains(const void* address) const { return offset_of(address) >= 0 && offset_of(address) < meeting_.bytes; }
  std::byte* at(int64_t offset) const { return base_ + offset; }
  std::byte* mailbox(Rank rank, uint32_t sequence) const;  ///< kMailboxBytes, two by turns
  static constexpr int64_t kMailboxBytes = 8192;

  /// Tells sleeping ranks to look again. Call after every store that a peer may wait for.
  void pulse();

  /// Returns once `arrived(r)` holds for every rank r, and how long that took. Spins briefly, then sleeps. Throws PeerError
  /// that names rank, process and operation if a missing rank died, failed or left, or did not arrive within the time-out;
  /// AgreementError on all ranks, naming what each waits for, if they wait for each other.
  template <class Arrived>
  std::chrono::nanoseconds wait(const Operation& operation, Arrived&& arrived) {
    if (all(arrived)) return {};
    return wait_slowly(operation, arrived);
  }
  template <class Arrived>
  bool all(Arrived&& arrived) const {
    for (int r = 0; r < ranks_; ++r)
      if (!arrived(Rank(r))) return false;
    return true;
  }

  /// As `wait`, but gives up (returns false) when every missing rank is itself waiting: nobody would ever come.
  bool wait_unless_peers_wait(const Operation& operation, const std::function<bool(Rank)>& arrived,
                              std::chrono::nanoseconds& waited);

  /// The number of the last step that this rank has finished, for the errors of its peers.
  void finished_step(int64_t step) noexcept;
  /// This rank ends on purpose, or because of an error that its peers should be told about. The first call counts.
  void leave() noexcept;
  void fail(const std::string& message) noexcept;

 private:
  friend class SharedBlock;
  Segment(const World& world, Meeting meeting, std::chrono::milliseconds timeout);
  std::chrono::nanoseconds wait_slowly(const Operation& operation, const std::function<bool(Rank)>& arrived);
  void sleep_until_pulse(const std::function<bool()>& done);
  void check_peers(const Operation& operation, const std::function<bool(Rank)>& arrived) const;
  bool stands_still(Stillness& seen) const;
  [[noreturn]] void refuse_to_wait(const Operation& operation, const std::function<bool(Rank)>& arrived) const;
  [[noreturn]] void disagree(const Operation& operation);
  void end_as(Presence presence, const std::string& message) noexcept;
  std::string describe(Rank rank) const;
  std::string progress_of(Rank rank) const;
  void announce(const Operation& operation, bool waiting);

  Rank rank_;
  int ranks_;
  std::chrono::milliseconds timeout_;
  Meeting meeting_;
  std::vector<Descriptor> processes_;  // pidfds
  std::byte* base_ = nullptr;
  Control* control_ = nullptr;
  int64_t next_object_ = 0;
  uint32_t objects_ = 0;
  int spins_;
};

/// Zeroed memory at the same offset on all ranks, 4096-aligned. All ranks allocate in the same order. Its pages return to
/// the system when the last rank has given its block back.
class SharedBlock {
 public:
  /// Throws AgreementError if another rank allocates something else at this place in the order, SystemError if the address
  /// range is used up.
  SharedBlock(std::shared_ptr<Segment> segment, Bytes bytes, const std::string& label);
  ~SharedBlock();
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

  std::byte* data() const { return data_; }
  Bytes bytes() const { return bytes_; }

 private:
  std::shared_ptr<Segment> segment_;
  std::byte* data_ = nullptr;
  Bytes bytes_;
  uint32_t index_ = 0;
};

}  // namespace tessera
