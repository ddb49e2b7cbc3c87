#pragma once

#include <memory>

#include "tessera/comm/communicator.h"
#include "tessera/comm/segment.h"

namespace tessera {

/// The communicator of ranks that share a host: parameters and gradients are read where they lie.
class SharedMemory final : public Communicator {
 public:
  /// The connection of this process to its run; made at the first call (collective), shared by all users of `world`, and
  /// closed with the last of them. The time-out is TESSERA_TIMEOUT_MS or 300,000 ms. Throws as Segment::join does.
  static std::shared_ptr<SharedMemory> connect(const World& world);

  ~SharedMemory() override;

  Rank rank() const override { return segment_->rank(); }
  int size() const override { return segment_->ranks(); }
  std::vector<std::string> all_gather(const std::string& label, const std::string& message) override;
  std::unique_ptr<ParameterWindow> parameter_window(const std::string& label, Bytes bytes, WindowPlan plan) override;
  std::unique_ptr<GradientExchange> gradient_exchange(const std::string& label, size_t parameters) override;
  std::shared_ptr<std::byte> peer_readable(const std::string& label, Bytes bytes) override;
  void read_peer(Rank peer, int64_t offset, void* to, Bytes bytes) override;
  int64_t offset_of(const void* mine) const override { return segment_->offset_of(mine); }
  bool peers_can_read(const void* mine) const override { return segment_->contains(mine); }
  void finished_step(int64_t step) noexcept override { segment_->finished_step(step); }
  void fail(const std::string& message) noexcept override { segment_->fail(message); }

  const std::shared_ptr<Segment>& segment() const { return segment_; }

 private:
  explicit SharedMemory(std::shared_ptr<Segment> segment);
  std::vector<std::string> exchange_part(const std::string& label, std::string_view part);

  std::shared_ptr<Segment> segment_;
  SharedBlock progress_;  // one counter a rank: the collectives that it has entered
  uint32_t sequence_ = 0;
};

}  // namespace tessera
