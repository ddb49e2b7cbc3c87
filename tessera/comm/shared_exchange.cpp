#include "tessera/comm/shared_exchange.h"

namespace tessera {

SharedExchange::SharedExchange(const std::shared_ptr<Segment>& segment, const std::string& label, size_t parameters)
    : segment_(segment),
      parameters_(parameters),
      block_(segment, Bytes(segment->ranks() * static_cast<int64_t>(sizeof(Counters) + 2 * parameters * sizeof(int64_t))),
             label + " gradient offers") {}

int64_t* SharedExchange::offers(Rank rank) const {
  auto* first = reinterpret_cast<int64_t*>(block_.data() + sizeof(Counters) * static_cast<size_t>(segment_->ranks()));
  return first + 2 * parameters_ * static_cast<size_t>(rank.value);
}

void SharedExchange::offer(size_t parameter, const void* gradient) {
  offers(segment_->rank())[parameter] = gradient == nullptr ? 0 : segment_->offset_of(gradient);
}

void SharedExchange::offer_sum(size_t parameter, const void* sum) {
  offers(segment_->rank())[parameters_ + parameter] = sum == nullptr ? 0 : segment_->offset_of(sum);
}

void SharedExchange::announce(std::atomic<uint32_t>& counter, uint32_t round) {
  counter.store(round, std::memory_order_release);
  segment_->pulse();
}

std::chrono::nanoseconds SharedExchange::wait_posted(uint32_t round, std::string_view unit, int64_t step) {
  return segment_->wait({"the reduction of the gradients", unit, step}, [&](Rank r) { return posted(r, round); });
}

std::chrono::nanoseconds SharedExchange::wait_sums(uint32_t round, std::string_view unit, int64_t step) {
  return segment_->wait({"the gather of the reduced gradients", unit, step}, [&](Rank r) { return sums_posted(r, round); });
}

std::chrono::nanoseconds SharedExchange::wait_finished(uint32_t round, std::string_view unit, int64_t step) {
  return segment_->wait({"the return of the gradients", unit, step}, [&](Rank r) { return finished(r, round); });
}

std::chrono::nanoseconds SharedExchange::wait_posted_politely(uint32_t round, std::string_view unit, int64_t step) {
  std::chrono::nanoseconds waited{};
  segment_->wait_unless_peers_wait(
      {"the reduction of the gradients", unit, step}, [&](Rank r) { return posted(r, round); }, waited);
  return waited;
}

}  // namespace tessera
