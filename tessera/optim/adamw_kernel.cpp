#include "tessera/optim/adamw_kernel.h"

#include <cmath>

#include "tessera/base/check.h"
#include "tessera/base/text.h"
#include "tessera/comm/parallel_chunks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/optim/adamw_kernel.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "tessera/comm/block-inl.h"

#ifndef TESSERA_OPTIM_ADAMW_KERNEL_FACTORS_
#define TESSERA_OPTIM_ADAMW_KERNEL_FACTORS_
namespace tessera {

/// The factors of one step, computed in double and rounded once to the type of the state, as torch does with its scalars.
template <class C>
struct AdamWFactors {
  explicit AdamWFactors(const AdamWStep& step)
      : gradient_scale(static_cast<C>(step.gradient_scale)),
        decay(static_cast<C>(1 - step.lr * step.weight_decay)),
        beta1(static_cast<C>(step.beta1)),
        beta2(static_cast<C>(step.beta2)),
        one_minus_beta1(static_cast<C>(1 - step.beta1)),
        one_minus_beta2(static_cast<C>(1 - step.beta2)),
        root_correction2(static_cast<C>(std::sqrt(1 - std::pow(step.beta2, static_cast<double>(step.step))))),
        eps(static_cast<C>(step.eps)),
        minus_step_size(static_cast<C>(-step.lr / (1 - std::pow(step.beta1, static_cast<double>(step.step))))) {}

  C gradient_scale, decay, beta1, beta2, one_minus_beta1, one_minus_beta2, root_correction2, eps, minus_step_size;
};

/// The arguments of adamw_update.
template <class C>
struct Update {
  SumSources gradients;
  AdamWFactors<C> factors;
  AdamWState state;
  Writing writing_working;
  Writing writing_gradient;
};

/// The elements of each source that are needed next.
struct Ahead {
  std::span<const void* const> sources;
  int64_t begin;
  int64_t size;  ///< bytes of an element
};

}  // namespace tessera
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::HWY_NAMESPACE {

/// One vector of the update; `block` holds the gradient and receives the new parameter. What is fused and what is not
/// follows torch's vectorised kernels (mul_, add_ with alpha, addcmul_, div, addcdiv_): the moments have torch's bits where
/// the CPU has fused operations, and the parameters too except where MKL's square root, which torch uses, is not the
/// nearest.
template <class D, class C>
HWY_INLINE void update_vector(D d, const AdamWFactors<C>& factors, C* master, C* exp_avg, C* exp_avg_sq, C* block) {
  const auto g = hn::Load(d, block);
  const auto p = hn::Mul(hn::LoadU(d, master), hn::Set(d, factors.decay));
  const auto m =
      hn::MulAdd(g, hn::Set(d, factors.one_minus_beta1), hn::Mul(hn::LoadU(d, exp_avg), hn::Set(d, factors.beta1)));
  const auto v = hn::MulAdd(hn::Mul(g, hn::Set(d, factors.one_minus_beta2)), g,
                            hn::Mul(hn::LoadU(d, exp_avg_sq), hn::Set(d, factors.beta2)));
  const auto denominator = hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, factors.root_correction2)), hn::Set(d, factors.eps));
  const auto updated = hn::Add(p, hn::Div(hn::Mul(m, hn::Set(d, factors.minus_step_size)), denominator));
  hn::StoreU(m, d, exp_avg);
  hn::StoreU(v, d, exp_avg_sq);
  hn::StoreU(updated, d, master);
  hn::Store(updated, d, block);
}

/// The update of a block. Its arithmetic leaves memory idle, so that the next block's gradients are fetched meanwhile.
template <class C>
HWY_NOINLINE void update_block(const AdamWFactors<C>& factors, C* HWY_RESTRICT master, C* HWY_RESTRICT exp_avg,
                               C* HWY_RESTRICT exp_avg_sq, C* HWY_RESTRICT block, int64_t n, const Ahead& ahead) {
  const hn::ScalableTag<C> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (const void* source : ahead.sources)
      hwy::Prefetch(static_cast<const std::byte*>(source) + (ahead.begin + i) * ahead.size);
    update_vector(d, factors, master + i, exp_avg + i, exp_avg_sq + i, block + i);
  }
  if (i == n) return;
  C padded[3][kColumns] = {};
  const size_t bytes = static_cast<size_t>(n - i) * sizeof(C);
  std::memcpy(padded[0], master + i, bytes);
  std::memcpy(padded[1], exp_avg + i, bytes);
  std::memcpy(padded[2], exp_avg_sq + i, bytes);
  update_vector(d, factors, padded[0], padded[1], padded[2], block + i);
  std::memcpy(master + i, padded[0], bytes);
  std::memcpy(exp_avg + i, padded[1], bytes);
  std::memcpy(exp_avg_sq + i, padded[2], bytes);
}

/// adamw_update of the elements [begin, end), block by block. Returns Σ g².
template <class C>
double update_range(const Update<C>& update, int64_t begin, int64_t end) {
  HWY_ALIGN_MAX C block[kBlock];
  HWY_ALIGN_MAX C room[kBlock];
  const AdamWState& state = update.state;
  const auto write = [&](void* array, Element element, Writing writing, int64_t i, int64_t n) {
    const int64_t size = size_of(element);
    if (array != nullptr)
      write_bytes(rounded_block(block, element, n, room), static_cast<std::byte*>(array) + i * size, n * size, writing);
  };
  const auto at = [](void* array, int64_t i) { return static_cast<C*>(array) + i; };
  double squares = 0;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    sum_block(update.gradients, i, n, update.factors.gradient_scale, block);
    const double block_squares = squares_of(block, n);
    squares += block_squares;
    write(state.gradient_sum, state.gradient_element, update.writing_gradient, i, n);
    // A finite sum of squares says that all are finite. One that is not may have overflowed (in fp64 only).
    if (!std::isfinite(block_squares) && !std::all_of(block, block + n, [](C g) { return std::isfinite(g); })) continue;
    const Ahead ahead{i + n < end ? update.gradients.sources : std::span<const void* const>(), i + n,
                      size_of(update.gradients.element)};
    update_block(update.factors, at(state.master, i), at(state.exp_avg, i), at(state.exp_avg_sq, i), block, n, ahead);
    write(state.working, state.working_element, update.writing_working, i, n);
  }
  hwy::FlushStream();
  return squares;
}

double update_floats(const Update<float>& update, int64_t begin, int64_t end) { return update_range(update, begin, end); }
double update_doubles(const Update<double>& update, int64_t begin, int64_t end) { return update_range(update, begin, end); }

}  // namespace tessera::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {

HWY_EXPORT(update_floats);
HWY_EXPORT(update_doubles);

SumResult adamw_update(const SumSources& gradients, const AdamWStep& step, const AdamWState& state, int64_t count) {
  TESSERA_CHECK(count >= 0 && step.step >= 1, text("an AdamW step ", step.step, " of ", count, " elements"));
  const auto is_double = [](Element element) { return element == Element::float64; };
  const bool wants_double = is_double(gradients.element) || (state.working != nullptr && is_double(state.working_element)) ||
                            (state.gradient_sum != nullptr && is_double(state.gradient_element));
  TESSERA_CHECK(is_double(state.element) || (state.element == Element::float32 && !wants_double),
                "AdamW's state is float32, or float64 where anything else is");
  const auto run = [&](auto range, const auto& factors) {
    const Update update{gradients, factors, state, writing_of(count * size_of(state.working_element)),
                        writing_of(count * size_of(state.gradient_element))};
    return SumResult{sum_over_chunks(count, [&](int64_t begin, int64_t end) { return range(update, begin, end); })};
  };
  if (is_double(state.element)) return run(HWY_DYNAMIC_DISPATCH(update_doubles), AdamWFactors<double>(step));
  return run(HWY_DYNAMIC_DISPATCH(update_floats), AdamWFactors<float>(step));
}

}  // namespace tessera
#endif
