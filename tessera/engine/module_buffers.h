#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

/// What happens to a module's buffers (running statistics, tables) that ranks have written differently. Looked at at the
/// start, when a difference is said on stderr, and once a step, and then only those that were written to since.
enum class Buffers : uint8_t {
  average,    ///< floating-point ones become the mean over ranks, in fp64; of others rank 0's count
  broadcast,  ///< rank 0's replace the others'
  local,      ///< stay each rank's own; that they differ is said once on stderr
};

/// The buffers of one module, on this rank.
class ModuleBuffers {
 public:
  ModuleBuffers(std::vector<std::pair<std::string, at::Tensor>> buffers, Buffers policy);

  /// At the start: with `take_first`, rank 0's replace the others' unless they are local. Else, where some differ between
  /// ranks, the first is named on stderr, and the policy is applied to all. Throws AgreementError where the names differ, or
  /// types or shapes of buffers that are not local. Collective.
  void agree(Communicator& communicator, bool take_first);

  /// Applies the policy to what was written since the last call. `speakers`: the ranks that count, of which the first stands
  /// for rank 0; empty means all. Collective.
  void synchronise(Communicator& communicator, const std::vector<bool>& speakers = {});

  /// Buffer number `i` of named() was written, the same on all ranks: there is nothing to synchronise.
  void note_equal(size_t i) { marks_[i] = mark(buffers_[i].second); }

  bool empty() const { return buffers_.empty(); }
  const std::vector<std::pair<std::string, at::Tensor>>& named() const { return buffers_; }

 private:
  void refuse_other_kinds(Communicator& communicator) const;
  std::string differing(Communicator& communicator, const std::vector<size_t>& which);
  void tell_that_differs(const Communicator& communicator, const std::string& name, std::string_view when);
  void apply(Communicator& communicator, Buffers policy, const std::vector<size_t>& which,
             const std::vector<bool>& speakers);
  std::vector<size_t> written_anywhere(Communicator& communicator);
  static uint64_t mark(const at::Tensor& buffer);
  std::vector<uint64_t> marks() const;

  std::vector<std::pair<std::string, at::Tensor>> buffers_;
  std::vector<uint64_t> marks_;  // when last looked at
  Buffers policy_;
  bool told_ = false;
};

}  // namespace tessera
