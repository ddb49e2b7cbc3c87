#pragma once

#include <cstdint>

#include "tessera/comm/sum_kernel.h"

namespace tessera {

/// The scalars of one AdamW step (Loshchilov & Hutter 2019, algorithm 2, in the arrangement of torch::optim::AdamW).
struct AdamWStep {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  int64_t step = 1;             ///< counts from 1; the bias corrections are 1 − beta^step
  double gradient_scale = 1.0;  ///< multiplies the summed gradient: 1/ranks for a mean, times a clipping coefficient
};

/// Where one interval of AdamW's state lies. All arrays have `count` elements, each aligned to its size, and do not overlap.
struct AdamWState {
  void* master;             ///< fp32 (fp64 for an fp64 model), updated in place
  void* exp_avg;            ///< first moment
  void* exp_avg_sq;         ///< second moment
  Element element;          ///< of master: float32, or float64, which it must be where anything else is
  Element moment_element;   ///< of both moments: `element`, or bfloat16. The update uses them before they are rounded
  void* working = nullptr;  ///< if not null, receives the new parameter rounded to `working_element`
  Element working_element = Element::float32;
  void* gradient_sum = nullptr;  ///< if not null, receives the scaled, summed gradient rounded to `gradient_element`
  Element gradient_element = Element::float32;
};

/// One pass over the interval: g = gradient_scale · Σ sources (in order, with the bits of sum_sources into the state's
/// type), then AdamW with that g. Returns Σ g² as sum_sources does: not finite if any g is not.
///
/// The factors are computed in double and rounded once. The moments have the bits of torch::optim::AdamW where the CPU has
/// fused multiply-add; everything is within a few ulp of it, and of the fused kernel behind Python's AdamW(fused=True).
///
/// For finite gradients the bits of an element depend neither on its position, nor on how an interval is cut into calls, nor
/// on the number of threads. A block of 512 elements, counted from the start of the call, that has a gradient that is not
/// finite is left unchanged, the working parameters too; only `gradient_sum` receives it.
///
/// `working` may be `master` itself. Fastest when all arrays are 64-byte aligned. Runs on at::get_num_threads() threads.
/// Throws InternalError if step < 1 or the element types do not fit. O(count · sources).
SumResult adamw_update(const SumSources& gradients, const AdamWStep& step, const AdamWState& state, int64_t count);

}  // namespace tessera
