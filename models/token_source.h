#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/base/types.h"

namespace tessera::models {

/// Samples of `context` + 1 tokens each: what a model reads and, shifted by one, what it should predict.
///
/// A training sample is a function of the seed and of its global index alone. Step s of a run with `ranks` ranks and
/// `batch_per_rank` samples on each takes the indices s · G … s · G + G − 1 with G = ranks · batch_per_rank; rank r has the
/// r-th equal part of them. So any number of ranks sees the same samples in the same order, and a run can be resumed at any
/// step. With micro-batches, `step` counts those: 2 of them on one rank are what one of them is on two ranks.
class TokenSource {
 public:
  virtual ~TokenSource() = default;

  /// int64 [batch_per_rank, context + 1]. Throws ConfigError for a negative step, a rank outside the world, or an empty
  /// batch.
  at::Tensor batch(int64_t step, Rank rank, int ranks, int64_t batch_per_rank) const;

  /// Held-out samples `first` … `first + count − 1`, in the order of the text: int64 [count, context + 1]. Throws
  /// ConfigError if there are not so many.
  at::Tensor validation_batch(int64_t first, int64_t count) const;

  virtual int64_t validation_samples() const = 0;
  virtual int64_t vocabulary() const = 0;
  int64_t context() const { return context_; }

 protected:
  explicit TokenSource(int64_t context);

  /// Writes the `context` + 1 tokens of a sample.
  virtual void write_training_sample(uint64_t index, int64_t* tokens) const = 0;
  virtual void write_validation_sample(int64_t index, int64_t* tokens) const = 0;

 private:
  int64_t context_;
};

}  // namespace tessera::models
