#include "tessera/comm/shared_memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "tessera/base/environment.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/shared_exchange.h"
#include "tessera/comm/shared_window.h"

namespace tessera {
namespace {

struct alignas(64) Progress {
  std::atomic<uint32_t> entered;
};

struct Envelope {  // at the start of a mailbox; the message follows
  char label[120];
  int64_t bytes;
};
constexpr size_t kPart = Segment::kMailboxBytes - sizeof(Envelope);

Progress* progress_of(const SharedBlock& block) { return reinterpret_cast<Progress*>(block.data()); }

std::chrono::milliseconds time_out() {
  return std::chrono::milliseconds(environment_integer("TESSERA_TIMEOUT_MS").value_or(300'000));
}

}  // namespace

std::shared_ptr<SharedMemory> SharedMemory::connect(const World& world) {
  static std::mutex mutex;
  static std::weak_ptr<SharedMemory> connection;
  static int process = 0;  // a forked child must not use its parent's connection
  const std::lock_guard lock(mutex);
  auto existing = process == getpid() ? connection.lock() : nullptr;
  if (existing) return existing;
  std::shared_ptr<SharedMemory> made(new SharedMemory(Segment::join(world, time_out())));
  connection = made;
  process = getpid();
  return made;
}

SharedMemory::SharedMemory(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)),
      progress_(segment_, Bytes(sizeof(Progress) * static_cast<size_t>(segment_->ranks())), "progress") {}

SharedMemory::~SharedMemory() { segment_->leave(); }

std::vector<std::string> SharedMemory::exchange_part(const std::string& label, std::string_view part) {
  const uint32_t turn = ++sequence_;
  auto* envelope = reinterpret_cast<Envelope*>(segment_->mailbox(rank(), turn));
  std::memset(envelope->label, 0, sizeof envelope->label);
  std::memcpy(envelope->label, label.data(), std::min(label.size(), sizeof envelope->label - 1));
  envelope->bytes = static_cast<int64_t>(part.size());
  std::copy(part.begin(), part.end(), reinterpret_cast<char*>(envelope + 1));
  progress_of(progress_)[rank().value].entered.store(turn, std::memory_order_release);
  segment_->pulse();
  segment_->wait({"collective", label},
                 [&](Rank r) { return progress_of(progress_)[r.value].entered.load(std::memory_order_acquire) >= turn; });

  std::vector<std::string> parts;
  for (int r = 0; r < size(); ++r) {
    const auto* theirs = reinterpret_cast<const Envelope*>(segment_->mailbox(Rank(r), turn));
    if (std::strncmp(theirs->label, envelope->label, sizeof envelope->label) != 0)
      throw AgreementError(text("rank ", r, " is in the collective '", theirs->label, "' while rank ", rank().value,
                                " is in '", label, "' (number ", turn,
                                " of this run); all ranks must do the same things in the same order"));
    parts.emplace_back(reinterpret_cast<const char*>(theirs + 1), static_cast<size_t>(theirs->bytes));
  }
  return parts;
}

std::vector<std::string> SharedMemory::all_gather(const std::string& label, const std::string& message) {
  // The first part says how long the message is, so that all ranks know how many more parts the longest takes.
  const int64_t length = static_cast<int64_t>(message.size());
  const size_t first = std::min(message.size(), kPart - sizeof length);
  auto parts =
      exchange_part(label, std::string(reinterpret_cast<const char*>(&length), sizeof length) + message.substr(0, first));
  std::vector<std::string> messages;
  size_t longest = 0;
  for (const auto& part : parts) {
    int64_t whole = 0;
    std::memcpy(&whole, part.data(), sizeof whole);
    longest = std::max(longest, static_cast<size_t>(whole));
    messages.push_back(part.substr(sizeof whole));
  }
  for (size_t sent = kPart - sizeof length; sent < longest; sent += kPart) {
    const auto rest = sent < message.size() ? std::string_view(message).substr(sent, kPart) : std::string_view();
    parts = exchange_part(label, rest);
    for (size_t r = 0; r < parts.size(); ++r) messages[r] += parts[r];
  }
  return messages;
}

std::unique_ptr<ParameterWindow> SharedMemory::parameter_window(const std::string& label, Bytes bytes, WindowPlan plan) {
  return std::make_unique<SharedWindow>(segment_, label, bytes, std::move(plan));
}

std::unique_ptr<GradientExchange> SharedMemory::gradient_exchange(const std::string& label, size_t parameters) {
  return std::make_unique<SharedExchange>(segment_, label, parameters);
}

std::shared_ptr<std::byte> SharedMemory::peer_readable(const std::string& label, Bytes bytes) {
  const int64_t stride = round_up(bytes.value, 4096);
  auto block = std::make_shared<SharedBlock>(segment_, Bytes(stride * size()), label);
  return {block, block->data() + stride * rank().value};
}

void SharedMemory::read_peer(Rank, int64_t offset, void* to, Bytes bytes) {
  std::memcpy(to, segment_->at(offset), static_cast<size_t>(bytes.value));
}

}  // namespace tessera
