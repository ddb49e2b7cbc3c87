#pragma once

#include <vector>

#include "tessera/base/types.h"
#include "tessera/layout/layout.h"
#include "tessera/layout/placements.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

/// How the ranks of a mesh divide a unit's state, as placements say: which part of the parameters, of the optimizer state
/// and of the summing of gradients is whose. Pure arithmetic.
///
/// Parameters are in `parameter_parts()` parts, optimizer state in `optimizer_parts()`: 1 where it is replicated. Ranks are
/// numbered anew as slots, so that those of one part are neighbours: slot = place on the shard axis · replicas + place on
/// the replicate axis.
class Division {
 public:
  /// Throws ConfigError if the placements name an axis that the mesh lacks, or name none and the mesh has several of more
  /// than one rank.
  Division(const Placements& placements, const Mesh& mesh);

  int ranks() const { return static_cast<int>(slots_.size()); }
  int parameter_parts() const { return parameter_parts_; }
  int optimizer_parts() const { return optimizer_parts_; }

  int parameter_part(Rank rank) const { return slot(rank) / (ranks() / parameter_parts_); }
  int optimizer_part(Rank rank) const { return slot(rank) / (ranks() / optimizer_parts_); }
  /// Ranks of one copy have all parameters between them, each a part.
  int copies() const { return ranks() / parameter_parts_; }
  int copy(Rank rank) const { return slot(rank) % copies(); }

  /// Do several ranks update the same elements, and so need each other's sums of gradients?
  bool shares_sums() const { return optimizer_parts_ < ranks(); }
  /// Are parameters updated by ranks of another copy, from where they must be fetched?
  bool copies_exchange() const { return optimizer_parts_ > parameter_parts_; }

  /// Elements of parameter `p` that `rank` holds, updates, and sums the gradients of. The latter are a part of the second
  /// and have the same `local`. Each element is summed by exactly one rank.
  std::vector<Run> held(const Layout& layout, ParameterIndex p, Rank rank) const;
  std::vector<Run> updated(const Layout& layout, ParameterIndex p, Rank rank) const;
  std::vector<Run> summed(const Layout& layout, ParameterIndex p, Rank rank) const;

 private:
  int slot(Rank rank) const { return slots_[static_cast<size_t>(rank.value)]; }

  std::vector<int> slots_;  // by rank
  int parameter_parts_ = 1, optimizer_parts_ = 1;
};

}  // namespace tessera
