#include "tessera/comm/shared_window.h"

#include <cstring>

namespace tessera {

SharedWindow::SharedWindow(const std::shared_ptr<Segment>& segment, const std::string& label, Bytes bytes, bool one_copy)
    : segment_(segment),
      bytes_(bytes),
      stride_(one_copy ? 0 : round_up(bytes.value, 4096)),
      control_(segment, Bytes(static_cast<int64_t>(sizeof(Published)) * segment->ranks()), label + " epochs"),
      memory_(segment, one_copy ? bytes : Bytes(stride_ * segment->ranks()), label + " parameters") {}

void SharedWindow::publish(uint32_t epoch) {
  published()[segment_->rank().value].epoch.store(epoch, std::memory_order_release);
  segment_->pulse();
}

std::chrono::nanoseconds SharedWindow::gather(uint32_t epoch, std::string_view unit, int64_t step) {
  const auto written = [&](Rank r) { return published()[r.value].epoch.load(std::memory_order_acquire) >= epoch; };
  auto spent = segment_->wait({"the gather", unit, step}, written);
  if (stride_ == 0 || held_ == epoch) return spent;
  const auto start = std::chrono::steady_clock::now();
  const int64_t chunk = bytes_.value / segment_->ranks();
  for (int r = 0; r < segment_->ranks(); ++r)
    if (r != segment_->rank().value)
      std::memcpy(data() + r * chunk, replica(Rank(r)) + r * chunk, static_cast<size_t>(chunk));
  held_ = epoch;
  return spent + (std::chrono::steady_clock::now() - start);
}

}  // namespace tessera
