#pragma once

#include <span>
#include <vector>

#include "tessera/base/types.h"
#include "tessera/layout/division.h"
#include "tessera/layout/layout.h"
#include "tessera/layout/placements.h"

namespace tessera {

/// A unit, as far as the memory of its state depends on it. Sizes in bytes an element.
struct UnitSizes {
  const Layout& layout;
  const Division& division;
  Placements placements;
  int64_t working = 4;
  int64_t taken = 4;            ///< of gradients that are handed over
  int64_t gradient = 4;         ///< of reduced gradients
  int64_t master = 0;           ///< of separate master parameters
  int64_t moments = 8;          ///< of trainable units
  std::vector<bool> trainable;  ///< by parameter
  int64_t shown_copies = 0;     ///< bytes of the shards' .grad that are not views of reduced gradients
};

/// The most that one rank holds of a model's state at once while it trains, in bytes. Activations come on top.
struct PeakBytes {
  int64_t parameters = 0;  ///< this rank's part of the working parameters; a host's ranks share them, so a gather takes none
  int64_t gradients = 0;   ///< reduced; replicated ones whole
  int64_t optimizer = 0;   ///< moments and separate master parameters
  int64_t in_flight = 0;   ///< unreduced gradients of sharded ones, on the way to the ranks that sum them
  int64_t total() const { return parameters + gradients + optimizer + in_flight; }
};

/// Of `units` in the order of forward, on `rank`. In flight are at most the unreduced gradients of three units that follow
/// each other: those that peers still read, those that a rank hands over ahead of its peers, and those being made. Not
/// predicted: units that backward uses again after their gradients were complete, whose gradients wait for its end, and sums
/// of micro-batches that replicated 16-bit gradients are kept in. O(parameters).
PeakBytes predicted_peak(std::span<const UnitSizes> units, Rank rank);

}  // namespace tessera
