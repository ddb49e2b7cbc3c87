#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/gradient_exchange.h"
#include "tessera/comm/parameter_window.h"
#include "tessera/mesh/world.h"

namespace tessera {

/// What ranks say to each other. The small collectives are two-sided: all ranks call them in the same order with the same
/// label, and a rank that calls another one makes all throw an AgreementError naming both. Parameters and gradients of a
/// unit travel through the two objects that this makes, which are one-sided.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual Rank rank() const = 0;
  virtual int size() const = 0;

  /// Every rank's `message`, by rank. Any length, and lengths may differ. O(ranks · bytes).
  virtual std::vector<std::string> all_gather(const std::string& label, const std::string& message) = 0;

  /// The parameters of one unit, `bytes` bytes a copy. Ranks of one copy see one memory.
  virtual std::unique_ptr<ParameterWindow> parameter_window(const std::string& label, Bytes bytes, WindowPlan plan) = 0;

  /// The gradients of one unit with `parameters` parameters.
  virtual std::unique_ptr<GradientExchange> gradient_exchange(const std::string& label, size_t parameters) = 0;

  /// `bytes` zeroed bytes of this rank's own that peers can read through gradient_exchange and read_peer.
  virtual std::shared_ptr<std::byte> peer_readable(const std::string& label, Bytes bytes) = 0;

  /// Copies `bytes` bytes from where `peer` says that they lie (an offset that peer got from offset_of) to `to`.
  virtual void read_peer(Rank peer, int64_t offset, void* to, Bytes bytes) = 0;
  virtual int64_t offset_of(const void* mine) const = 0;
  virtual bool peers_can_read(const void* mine) const = 0;

  /// Notes how far this rank has come, for the errors of peers that wait for it.
  virtual void finished_step(int64_t step) noexcept = 0;

  /// Tells the peers why this rank stops, so that they stop too and say so.
  virtual void fail(const std::string& message) noexcept = 0;

  /// Returns when all ranks have called it.
  void barrier(const std::string& label) { all_gather(label, ""); }
};

}  // namespace tessera
