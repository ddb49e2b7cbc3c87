#include "tessera/comm/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

constexpr int kMaxRanks = 256;
constexpr int kMaxObjects = 1 << 16;
constexpr int64_t kPage = 4096;
constexpr auto kStandstill = std::chrono::milliseconds(400);  // all ranks wait and nothing moves

}  // namespace

enum class Presence : uint32_t { running, left, failed, disagrees };

namespace {

struct alignas(128) RankControl {
  std::atomic<Presence> presence;
  std::atomic<uint32_t> waiting;  // in a wait for peers, with `operation` describing it
  std::atomic<int64_t> finished;  // its last step, 0 before the first has ended
  std::atomic<uint32_t> looks;    // how often it has looked, in a wait, and found that it must wait on
  char operation[160];
  char message[512];  // why it failed or disagrees
};

struct ObjectControl {
  std::atomic<uint64_t> identity;  // hash of label and size, set by whoever allocates first
  std::atomic<uint32_t> released;  // ranks that have given it back
};

}  // namespace

struct Control {
  std::atomic<uint32_t> pulse;
  std::atomic<uint32_t> sleepers;
  RankControl ranks[kMaxRanks];
  ObjectControl objects[kMaxObjects];
};

// Since when nothing has moved, as one waiting rank sees it.
struct Stillness {
  std::chrono::steady_clock::time_point since;
  uint32_t pulse = 0;
  uint32_t looks[kMaxRanks] = {};  // of each rank, then
};

namespace {

constexpr int64_t kMailboxes = (sizeof(Control) + kPage - 1) / kPage * kPage;
constexpr int64_t kObjects = kMailboxes + kMaxRanks * 2 * Segment::kMailboxBytes;

int64_t physical_memory() { return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE); }

// Address space, not memory: every region can hold more than the machine has.
int64_t object_space(int64_t physical) { return round_up(8 * physical, int64_t{1} << 30); }
int64_t arena_space(int64_t physical) { return round_up(2 * physical, int64_t{1} << 30); }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

void copy_text(char* to, size_t capacity, std::string_view from) {
  const size_t length = std::min(capacity - 1, from.size());
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}

uint64_t hash_of(const std::string& label, int64_t bytes) {
  uint64_t hash = 1469598103934665603ULL ^ static_cast<uint64_t>(bytes);  // FNV-1a
  for (const char c : label) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash | 1;
}

std::string named(const Operation& operation) {
  return text(operation.kind, operation.what.empty() ? "" : " of ", operation.what,
              operation.step > 0 ? text(" in step ", operation.step) : "");
}

std::string process_state(int process) {
  std::ifstream stat(text("/proc/", process, "/stat"));
  std::string line;
  std::getline(stat, line);
  const size_t end = line.rfind(')');
  const char state = end != std::string::npos && end + 2 < line.size() ? line[end + 2] : '?';
  switch (state) {
    case 'T':
    case 't':
      return "stopped by a signal";
    case 'R':
      return "computing";
    case 'S':
      return "sleeping";
    case 'D':
      return "waiting for a device";
    case 'Z':
      return "dead";
    default:
      return "gone";
  }
}

}  // namespace

std::shared_ptr<Segment> Segment::join(const World& world, std::chrono::milliseconds timeout) {
  static int generation = 0;  // meetings of this process, so that a later one of the same run can't mix with an earlier
  const int64_t physical = physical_memory();
  const int64_t bytes = kObjects + object_space(physical) + world.local_size * arena_space(physical);
  return std::shared_ptr<Segment>(new Segment(world, meet(world, generation++, bytes, timeout), timeout));
}

Segment::Segment(const World& world, Meeting meeting, std::chrono::milliseconds timeout)
    : rank_(world.local_rank),
      ranks_(world.local_size),
      timeout_(timeout),
      meeting_(std::move(meeting)),
      next_object_(kObjects) {
  for (const int process : meeting_.process_ids) {
    processes_.emplace_back(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
    if (!processes_.back().open() && errno != ESRCH)  // which means: dead already
      throw SystemError(text("the system refuses to watch process ", process, " of this run (", std::strerror(errno),
                             "); ranks that share memory need pidfd_open, of Linux 5.3"));
  }
  void* mapped = mmap(nullptr, static_cast<size_t>(meeting_.bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                      meeting_.memory.get(), 0);
  if (mapped == MAP_FAILED)
    throw SystemError(text("the system refuses to map ", meeting_.bytes,
                           " bytes of address space for the ranks' shared memory (", std::strerror(errno),
                           "); raise `ulimit -v`, if it is set"));
  madvise(mapped, static_cast<size_t>(meeting_.bytes), MADV_DONTDUMP);
  base_ = static_cast<std::byte*>(mapped);
  control_ = reinterpret_cast<Control*>(base_);
  // Spinning only helps while the peer has a core of its own.
  spins_ = ranks_ <= static_cast<int>(std::thread::hardware_concurrency()) ? 2000 : 0;
}

Segment::~Segment() {
  leave();
  munmap(base_, static_cast<size_t>(meeting_.bytes));
}

SharedBlock::SharedBlock(std::shared_ptr<Segment> segment, Bytes bytes, const std::string& label)
    : segment_(std::move(segment)) {
  bytes_ = Bytes(round_up(std::max<int64_t>(bytes.value, 1), kPage));
  index_ = segment_->objects_;
  const int64_t offset = segment_->next_object_;
  if (index_ == kMaxObjects || segment_->at(offset + bytes_.value) > segment_->arena(Rank(0)))
    throw SystemError(text("the address range for shared objects is used up (", index_, " objects); wanted ", bytes.value,
                           " bytes for ", label));
  uint64_t seen = 0;
  const uint64_t mine = hash_of(label, bytes.value);
  if (!segment_->control_->objects[index_].identity.compare_exchange_strong(seen, mine) && seen != mine)
    throw AgreementError(
        text("rank ", segment_->rank_.value, " allocates ", label, " (", bytes.value,
             " bytes) where another rank allocates something else; all ranks must shard the same model in the same order"));
  data_ = segment_->at(offset);
  segment_->next_object_ += bytes_.value;
  ++segment_->objects_;
}

SharedBlock::~SharedBlock() {
  auto& released = segment_->control_->objects[index_].released;
  if (static_cast<int>(released.fetch_add(1) + 1) == segment_->ranks_)
    madvise(data_, static_cast<size_t>(bytes_.value), MADV_REMOVE);
}

std::byte* Segment::arena(Rank rank) const {
  return base_ + meeting_.bytes - (ranks_ - rank.value) * arena_capacity().value;
}
Bytes Segment::arena_capacity() const { return Bytes(arena_space(physical_memory())); }

std::byte* Segment::mailbox(Rank rank, uint32_t sequence) const {
  return base_ + kMailboxes + (rank.value * 2 + (sequence & 1)) * kMailboxBytes;
}

void Segment::pulse() {
  control_->pulse.fetch_add(1, std::memory_order_seq_cst);
  if (control_->sleepers.load(std::memory_order_seq_cst) > 0) futex(&control_->pulse, FUTEX_WAKE, INT32_MAX, nullptr);
}

void Segment::announce(const Operation& operation, bool waiting) {
  auto& mine = control_->ranks[rank_.value];
  if (waiting) copy_text(mine.operation, sizeof mine.operation, named(operation));
  mine.waiting.store(waiting ? 1 : 0, std::memory_order_release);
}

void Segment::sleep_until_pulse(const std::function<bool()>& done) {
  const uint32_t seen = control_->pulse.load(std::memory_order_seq_cst);
  control_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (!done()) {
    const timespec slice{0, 20'000'000};
    futex(&control_->pulse, FUTEX_WAIT, seen, &slice);
  }
  control_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

std::chrono::nanoseconds Segment::wait_slowly(const Operation& operation, const std::function<bool(Rank)>& arrived) {
  const auto start = std::chrono::steady_clock::now();
  const auto done = [&] { return all(arrived); };
  for (int spin = 0; spin < spins_; ++spin) {
    if (done()) return std::chrono::steady_clock::now() - start;
    relax();
  }
  announce(operation, true);
  pulse();
  auto checked = start;
  Stillness stillness;
  try {
    while (!done()) {
      control_->ranks[rank_.value].looks.fetch_add(1, std::memory_order_acq_rel);
      sleep_until_pulse(done);
      const auto now = std::chrono::steady_clock::now();
      if (now - checked < std::chrono::milliseconds(50)) continue;
      checked = now;
      check_peers(operation, arrived);
      if (now - start > timeout_) refuse_to_wait(operation, arrived);
      if (stands_still(stillness)) disagree(operation);
    }
  } catch (const std::exception& error) {
    fail(error.what());  // ranks that wait for this one must hear the cause; what it waited for stays announced
    throw;
  }
  announce(operation, false);
  return std::chrono::steady_clock::now() - start;
}

bool Segment::wait_unless_peers_wait(const Operation& operation, const std::function<bool(Rank)>& arrived,
                                     std::chrono::nanoseconds& waited) {
  if (all(arrived)) return true;
  const auto start = std::chrono::steady_clock::now();
  const auto done = [&] { return all(arrived); };
  const auto stuck = [&] {
    for (int r = 0; r < ranks_; ++r)
      if (r != rank_.value && !arrived(Rank(r)) && control_->ranks[r].waiting.load(std::memory_order_acquire) == 0)
        return false;
    return true;
  };
  announce(operation, true);
  pulse();  // a peer that waits for us in the same way must look again
  bool came = false;
  auto checked = start;
  try {
    for (int spin = 0; !(came = done()) && !stuck(); ++spin) {
      if (spin < spins_) {
        relax();
        continue;
      }
      sleep_until_pulse([&] { return done() || stuck(); });
      const auto now = std::chrono::steady_clock::now();
      if (now - checked < std::chrono::milliseconds(50)) continue;
      checked = now;
      check_peers(operation, arrived);
      if (now - start > timeout_) refuse_to_wait(operation, arrived);
    }
  } catch (const std::exception& error) {
    fail(error.what());  // ranks that wait for this one must hear the cause; what it waited for stays announced
    throw;
  }
  announce(operation, false);
  waited += std::chrono::steady_clock::now() - start;
  return came || done();
}

std::string Segment::progress_of(Rank rank) const {
  const int64_t finished = control_->ranks[rank.value].finished.load(std::memory_order_acquire);
  return finished > 0 ? text(" after step ", finished) : " before the end of its first step";
}

std::string Segment::describe(Rank rank) const {
  const auto& peer = control_->ranks[rank.value];
  const int process = meeting_.process_ids[static_cast<size_t>(rank.value)];
  std::string words = text("rank ", rank.value, " (process ", process, ") is ", process_state(process));
  words += progress_of(rank);
  if (peer.waiting.load(std::memory_order_acquire)) words += text(", itself waiting in ", peer.operation);
  return words;
}

void Segment::check_peers(const Operation& operation, const std::function<bool(Rank)>& arrived) const {
  const std::string where = text("rank ", rank_.value, " waited in ", named(operation));
  for (int r = 0; r < ranks_; ++r)  // a disagreement concerns all, whoever this rank waits for
    if (r != rank_.value && control_->ranks[r].presence.load(std::memory_order_acquire) == Presence::disagrees)
      throw AgreementError(text("rank ", r, " stopped while ", where, ": ", control_->ranks[r].message));
  for (int r = 0; r < ranks_; ++r) {
    const Rank rank(r);
    if (rank == rank_ || arrived(rank)) continue;
    const auto& peer = control_->ranks[r];
    const Presence presence = peer.presence.load(std::memory_order_acquire);
    pollfd ended{processes_[static_cast<size_t>(r)].get(), POLLIN, 0};
    const bool dead = ended.fd < 0 || (poll(&ended, 1, 0) > 0 && (ended.revents & POLLIN) != 0);
    if ((presence == Presence::running && !dead) || arrived(rank)) continue;  // what it did before it ended counts
    if (presence == Presence::failed) throw PeerError(text("rank ", r, " failed while ", where, ": ", peer.message));
    if (presence == Presence::left)
      throw PeerError(
          text("rank ", r, " has ended its part of the run", progress_of(rank), " while ", where,
               "; all ranks must run the same number of steps: give them as many batches, or see Sharded::join"));
    throw PeerError(text("rank ", r, " (process ", meeting_.process_ids[static_cast<size_t>(r)], ") died", progress_of(rank),
                         ", while ", where));
  }
}

bool Segment::stands_still(Stillness& seen) const {
  const auto now = std::chrono::steady_clock::now();
  const uint32_t pulse = control_->pulse.load();
  bool still = pulse == seen.pulse, looked = true;
  for (int r = 0; r < ranks_; ++r) {
    const auto& peer = control_->ranks[r];
    if (peer.presence.load() != Presence::running) continue;
    still &= peer.waiting.load(std::memory_order_acquire) != 0;
    // A rank that was stopped or not scheduled may wait for what has long come: only looking again, in vain, shows that it
    // has not.
    looked &= peer.looks.load(std::memory_order_acquire) - seen.looks[r] >= 2;
  }
  if (still) return looked && now - seen.since > kStandstill;
  seen.since = now;
  seen.pulse = pulse;
  for (int r = 0; r < ranks_; ++r) seen.looks[r] = control_->ranks[r].looks.load(std::memory_order_acquire);
  return false;
}

void Segment::refuse_to_wait(const Operation& operation, const std::function<bool(Rank)>& arrived) const {
  std::string missing;
  for (int r = 0; r < ranks_; ++r)
    if (!arrived(Rank(r))) missing += "; " + describe(Rank(r));
  throw PeerError(text("rank ", rank_.value, " waited ", timeout_.count(), " ms in ", named(operation), missing,
                       "; raise TESSERA_TIMEOUT_MS if a rank may take longer"));
}

void Segment::disagree(const Operation& operation) {
  std::string words = text("rank ", rank_.value, " waited in vain in ", named(operation));
  for (int r = 0; r < ranks_; ++r)
    if (r != rank_.value) words += "; " + describe(Rank(r));
  words +=
      "; all ranks wait for each other: they must do the same things in the same order, as many backwards a step, and "
      "the same parts recomputed as often (ranks with different numbers of batches: Sharded::join)";
  end_as(Presence::disagrees, words);
  throw AgreementError(words);
}

void Segment::finished_step(int64_t step) noexcept {
  control_->ranks[rank_.value].finished.store(step, std::memory_order_release);
}

void Segment::leave() noexcept {
  auto expected = Presence::running;
  control_->ranks[rank_.value].presence.compare_exchange_strong(expected, Presence::left);
  pulse();
}

void Segment::fail(const std::string& message) noexcept { end_as(Presence::failed, message); }

void Segment::end_as(Presence presence, const std::string& message) noexcept {
  auto& mine = control_->ranks[rank_.value];
  if (mine.presence.load() != Presence::running) return;
  copy_text(mine.message, sizeof mine.message, message);
  mine.presence.store(presence, std::memory_order_release);
  pulse();
}

}  // namespace tessera
