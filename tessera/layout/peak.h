#pragma once

#include <cstdint>
#include <span>

namespace tessera {

/// The most that one rank holds of a unit's or a model's state at once while it trains, in bytes. Activations come on top.
struct PeakBytes {
  int64_t parameters = 0;  ///< this rank's part of the working parameters; a host's ranks share them, so a gather takes none
  int64_t gradients = 0;   ///< reduced; replicated ones whole
  int64_t optimizer = 0;   ///< moments and separate master parameters
  int64_t in_flight = 0;   ///< unreduced gradients of sharded ones, on the way to the ranks that sum them
  int64_t total() const { return parameters + gradients + optimizer + in_flight; }
};

/// Of the model whose units, in the order of forward, need `units`. In flight are at most the unreduced gradients of three
/// units that follow each other: those that peers still read, those that a rank hands over ahead of its peers, and those
/// being made. Not predicted: units that backward uses again after their gradients were complete, whose gradients wait for
/// its end, and sums of micro-batches in 16 bits. O(units).
PeakBytes predicted_peak(std::span<const PeakBytes> units);

}  // namespace tessera
