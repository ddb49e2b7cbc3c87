#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

/// What happens to a module's buffers (running statistics, tables) that ranks have written differently. Looked at once a
/// step, and only those that were written to since.
enum class Buffers : uint8_t {
  average,    ///< floating-point ones become the mean over ranks, in fp64; of others rank 0's count
  broadcast,  ///< rank 0's replace the others'
  local,      ///< stay each rank's own; that they differ is said once on stderr
};

/// The buffers of one module, on this rank.
class ModuleBuffers {
 public:
  ModuleBuffers(std::vector<std::pair<std::string, at::Tensor>> buffers, Buffers policy);

  /// At the start: with `verify`, throws AgreementError naming the first buffer that differs between ranks; else rank 0's
  /// replace the others'. Nothing for local ones. Collective.
  void agree(Communicator& communicator, bool verify);

  /// Applies the policy to what was written since the last call. `speakers`: the ranks that count, of which the first stands
  /// for rank 0; empty means all. Collective.
  void synchronise(Communicator& communicator, const std::vector<bool>& speakers = {});

  /// Buffer number `i` of named() was written, the same on all ranks: there is nothing to synchronise.
  void note_equal(size_t i) { marks_[i] = mark(buffers_[i].second); }

  bool empty() const { return buffers_.empty(); }
  const std::vector<std::pair<std::string, at::Tensor>>& named() const { return buffers_; }

 private:
  std::string differing(Communicator& communicator, std::vector<size_t> which);
  std::vector<size_t> written_anywhere(Communicator& communicator);
  static uint64_t mark(const at::Tensor& buffer);
  std::vector<uint64_t> marks() const;

  std::vector<std::pair<std::string, at::Tensor>> buffers_;
  std::vector<uint64_t> marks_;  // when last looked at
  Buffers policy_;
  bool told_ = false;
};

}  // namespace tessera
