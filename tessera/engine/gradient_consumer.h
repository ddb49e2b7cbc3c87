#pragma once

#include <cstdint>

#include "tessera/comm/sum_kernel.h"

namespace tessera {

/// A piece of one parameter's gradient, ready to be used, and where the state that it updates lies. All pointers are to the
/// piece's first element; all arrays have `count` elements.
struct GradientPiece {
  uint32_t unit;
  uint32_t parameter;   ///< index in the unit
  int64_t state_begin;  ///< place of the first element in the part of the unit that this rank updates
  int64_t count;
  int64_t step;          ///< counts from 1; the same for all pieces of a step
  SumSources gradients;  ///< the gradient is scale · Σ sources
  double scale;
  void* master;
  Element master_element;
  void* working;  ///< where the updated parameter must be written too, or null if master is what the module sees
  Element working_element;
  void* sum;  ///< where the scaled sum must be left for others, or null
  Element sum_element;
};

/// An optimizer that takes gradients as pieces.
class GradientConsumer {
 public:
  virtual ~GradientConsumer() = default;

  /// Updates the piece's state. Returns Σ gradient²; leaves elements whose gradient is not finite alone.
  virtual SumResult consume(const GradientPiece& piece) = 0;

  /// Bytes of state an element of unit `unit`.
  virtual int64_t bytes_per_element(uint32_t unit) const = 0;

  /// A hash of the options, which must be the same on all ranks at each step.
  virtual uint64_t settings() const = 0;

  /// May `consume` be called with the ranks' unsummed gradients, as soon as they are there?
  virtual bool fuses_reduction() const = 0;
};

}  // namespace tessera
