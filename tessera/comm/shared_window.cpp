#include "tessera/comm/shared_window.h"

#include <cstring>
#include <utility>

namespace tessera {

SharedWindow::SharedWindow(const std::shared_ptr<Segment>& segment, const std::string& label, Bytes bytes, WindowPlan plan)
    : segment_(segment),
      bytes_(bytes),
      plan_(std::move(plan)),
      stride_(round_up(bytes.value, 4096)),
      control_(segment, Bytes(static_cast<int64_t>(sizeof(Published)) * segment->ranks()), label + " epochs"),
      memory_(segment, Bytes(stride_ * plan_.copies), label + " parameters") {}

SharedWindow::Published& SharedWindow::part_of_copy(size_t part) const {
  return published()[static_cast<size_t>(copy_index(segment_->rank())) * plan_.fetches.size() + part];
}

void SharedWindow::publish(uint32_t epoch) {
  published()[segment_->rank().value].epoch.store(epoch, std::memory_order_release);
  segment_->pulse();
}

std::chrono::nanoseconds SharedWindow::gather(uint32_t epoch, std::string_view unit, int64_t step) {
  const Operation operation{"the gather", unit, step};
  if (!plan_.fetches.empty()) return fetch(epoch, operation);
  return segment_->wait(operation, [&](Rank r) { return !shares_copy(r) || written(r, epoch); });
}

bool SharedWindow::prefetch(uint32_t epoch) {
  for (int r = 0; r < segment_->ranks(); ++r)
    if ((!plan_.fetches.empty() || shares_copy(Rank(r))) && !written(Rank(r), epoch)) return false;
  fetch_unclaimed(epoch);
  for (size_t part = 0; part < plan_.fetches.size(); ++part)
    if (!fetched(part, epoch)) return false;
  return true;
}

std::chrono::nanoseconds SharedWindow::fetch(uint32_t epoch, const Operation& operation) {
  const size_t parts = plan_.fetches.size();
  size_t done = 0;
  while (done < parts && fetched(done, epoch)) ++done;
  if (done == parts) return {};
  auto spent = segment_->wait(operation, [&](Rank r) { return written(r, epoch); });
  const auto start = std::chrono::steady_clock::now();
  fetch_unclaimed(epoch);
  spent += std::chrono::steady_clock::now() - start;
  // What others have claimed they are about to finish.
  return spent + segment_->wait(operation, [&](Rank r) {
    for (size_t part = 0; part < parts; ++part)
      if (!fetched(part, epoch) && (part_of_copy(part).claimed.load() & 0xffffffffU) == static_cast<uint32_t>(r.value))
        return false;
    return true;
  });
}

void SharedWindow::fetch_unclaimed(uint32_t epoch) {
  const uint64_t claim = uint64_t{epoch} << 32 | static_cast<uint32_t>(segment_->rank().value);
  const size_t parts = plan_.fetches.size();
  for (size_t i = 0; i < parts; ++i) {
    const size_t part = (static_cast<size_t>(plan_.first) + i) % parts;
    auto& here = part_of_copy(part);
    uint64_t before = here.claimed.load(std::memory_order_acquire);
    if (before >> 32 >= epoch || !here.claimed.compare_exchange_strong(before, claim)) continue;
    for (const auto& piece : plan_.fetches[part])
      std::memcpy(data() + piece.begin, copy_of(piece.owner) + piece.begin, static_cast<size_t>(piece.bytes));
    here.fetched.store(epoch, std::memory_order_release);
    segment_->pulse();
  }
}

}  // namespace tessera
