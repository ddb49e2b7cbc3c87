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

void SharedWindow::publish(uint32_t epoch) {
  published()[segment_->rank().value].epoch.store(epoch, std::memory_order_release);
  segment_->pulse();
}

std::chrono::nanoseconds SharedWindow::gather(uint32_t epoch, std::string_view unit, int64_t step) {
  const Operation operation{"the gather", unit, step};
  const auto reached = [&](const std::atomic<uint32_t>& counter) { return counter.load(std::memory_order_acquire) >= epoch; };
  const auto written = [&](Rank r) { return reached(published()[r.value].epoch); };
  if (!plan_.fetches) return segment_->wait(operation, [&](Rank r) { return !shares_copy(r) || written(r); });
  std::chrono::nanoseconds spent{};
  if (held_ != epoch) {
    spent = segment_->wait(operation, written);
    const auto start = std::chrono::steady_clock::now();
    for (const auto& piece : plan_.pieces)
      std::memcpy(data() + piece.begin, copy_of(piece.owner) + piece.begin, static_cast<size_t>(piece.bytes));
    held_ = epoch;
    published()[segment_->rank().value].fetched.store(epoch, std::memory_order_release);
    segment_->pulse();
    spent += std::chrono::steady_clock::now() - start;
  }
  return spent + segment_->wait(operation, [&](Rank r) { return !shares_copy(r) || reached(published()[r.value].fetched); });
}

}  // namespace tessera
