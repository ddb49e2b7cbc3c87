#include "tessera/optim/adamw_kernel.h"

#include <algorithm>
#include <cmath>

#include "tessera/base/check.h"
#include "tessera/base/text.h"
#include "tessera/comm/parallel_chunks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/optim/adamw_kernel.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "tessera/comm/sum-inl.h"

#ifndef TESSERA_OPTIM_ADAMW_KERNEL_ARGUMENTS_
#define TESSERA_OPTIM_ADAMW_KERNEL_ARGUMENTS_
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
        root_correction2(static_cast<C>(1 / std::sqrt(1 - std::pow(step.beta2, static_cast<double>(step.step))))),
        eps(static_cast<C>(step.eps)),
        minus_step_size(static_cast<C>(-step.lr / (1 - std::pow(step.beta1, static_cast<double>(step.step))))) {}

  C gradient_scale, decay, beta1, beta2, one_minus_beta1, one_minus_beta2;
  C root_correction2;  ///< multiplies √v. torch divides by its inverse, which takes a third longer, for one rounding less
  C eps, minus_step_size;
};

/// The arguments of adamw_update.
template <class C>
struct AdamWArguments {
  SumSources gradients;
  AdamWFactors<C> factors;
  AdamWState state;
};

}  // namespace tessera
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::HWY_NAMESPACE {

/// Elements whose gradient is summed, and seen to be finite, before any of them is updated. More would leave memory idle for
/// longer than the hardware's prefetching bridges: blocks of 2,048 took a quarter longer, of 256 and 1,024 a little.
inline constexpr int64_t kBlock = 512;

template <class C>
inline constexpr Element kElementOf = std::is_same_v<C, float> ? Element::float32 : Element::float64;

/// block[i] = scale · Σ sources[r][begin + i] for i in [0, n). Adds the squares to `squares`; returns whether all are
/// finite.
template <Element Gradient, class C>
HWY_NOINLINE bool sum_block(std::span<const void* const> sources, C scale, int64_t begin, int64_t n, C* HWY_RESTRICT block,
                            Squares& squares) {
  const Tag<C> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto factor = hn::Set(d, scale);
  auto zero = hn::Zero(d);  // until a NaN, or the NaN that ∞ − ∞ is, comes in
  for (int64_t i = 0; i < n; i += lanes) {
    const auto g = hn::Mul(sum_vector<Gradient>(d, sources, begin + i, std::min(lanes, n - i)), factor);
    zero = hn::Add(zero, hn::Sub(g, g));
    hn::Store(g, d, block + i);
    squares.add(block + i, lanes, i);
  }
  return hn::AllFalse(d, hn::IsNaN(zero));
}

/// to[i] = block[i] for i in [0, n), rounded.
template <Element To, class C>
HWY_NOINLINE void store_block(const C* block, int64_t n, Storage<To>* to) {
  const Tag<C> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; i += lanes) store_first<To>(d, std::min(lanes, n - i), hn::Load(d, block + i), to + i);
}

/// The update of elements [begin, begin + n), whose gradient is in `block`. What is fused and what is not follows torch's
/// vectorised kernels (mul_, add_ with alpha, addcmul_, addcdiv_), for the same bits where the CPU has fused multiply-add.
template <Element Working, Element Moment, class C>
HWY_NOINLINE void update_block(const AdamWArguments<C>& update, int64_t begin, int64_t n, const C* HWY_RESTRICT block) {
  constexpr Element kState = kElementOf<C>;
  const Tag<C> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const AdamWFactors<C> by = update.factors;
  C* master = static_cast<C*>(update.state.master) + begin;
  auto* exp_avg = static_cast<Storage<Moment>*>(update.state.exp_avg) + begin;
  auto* exp_avg_sq = static_cast<Storage<Moment>*>(update.state.exp_avg_sq) + begin;
  auto* working = static_cast<Storage<Working>*>(update.state.working);
  for (int64_t i = 0; i < n; i += lanes) {
    const int64_t part = std::min(lanes, n - i);
    const auto g = hn::Load(d, block + i);
    const auto old_m = hn::Mul(load_first<Moment>(d, part, exp_avg + i), hn::Set(d, by.beta1));
    const auto old_v = hn::Mul(load_first<Moment>(d, part, exp_avg_sq + i), hn::Set(d, by.beta2));
    const auto old_p = hn::Mul(load_first<kState>(d, part, master + i), hn::Set(d, by.decay));
    const auto m = hn::MulAdd(g, hn::Set(d, by.one_minus_beta1), old_m);
    const auto v = hn::MulAdd(hn::Mul(g, hn::Set(d, by.one_minus_beta2)), g, old_v);
    const auto denominator = hn::Add(hn::Mul(hn::Sqrt(v), hn::Set(d, by.root_correction2)), hn::Set(d, by.eps));
    const auto p = hn::Add(old_p, hn::Div(hn::Mul(m, hn::Set(d, by.minus_step_size)), denominator));
    store_first<Moment>(d, part, m, exp_avg + i);
    store_first<Moment>(d, part, v, exp_avg_sq + i);
    store_first<kState>(d, part, p, master + i);
    if (working != nullptr) store_first<Working>(d, part, p, working + begin + i);
  }
}

/// adamw_update of the elements [begin, end), block by block. Returns Σ g².
template <class C>
double update_range(const AdamWArguments<C>& update, int64_t begin, int64_t end) {
  const auto& [gradients, factors, state] = update;
  HWY_ALIGN_MAX C block[kBlock];
  Squares squares;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    bool finite = false;
    for_element<C>(gradients.element, [&, &from = gradients.sources, scale = factors.gradient_scale]<Element E>() {
      finite = sum_block<E>(from, scale, i, n, block, squares);
    });
    if (void* to = state.gradient_sum)
      for_element<C>(state.gradient_element,
                     [&]<Element E>() { store_block<E>(block, n, static_cast<Storage<E>*>(to) + i); });
    if (!finite) continue;
    for_element<C>(state.working_element, [&]<Element Working>() {
      if (state.moment_element == Element::bfloat16)
        update_block<Working, Element::bfloat16>(update, i, n, block);
      else
        update_block<Working, kElementOf<C>>(update, i, n, block);
    });
  }
  return squares.total();
}

double update_floats(const AdamWArguments<float>& update, int64_t begin, int64_t end) {
  return update_range(update, begin, end);
}
double update_doubles(const AdamWArguments<double>& update, int64_t begin, int64_t end) {
  return update_range(update, begin, end);
}

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
  TESSERA_CHECK(state.moment_element == state.element || state.moment_element == Element::bfloat16,
                "AdamW's moments are of the master's type or bfloat16");
  const auto run = [&]<class C>(auto range, const AdamWFactors<C>& factors) {
    const AdamWArguments<C> update{gradients, factors, state};
    return SumResult{sum_over_chunks(count, [&](int64_t begin, int64_t end) { return range(update, begin, end); })};
  };
  if (is_double(state.element)) return run(HWY_DYNAMIC_DISPATCH(update_doubles), AdamWFactors<double>(step));
  return run(HWY_DYNAMIC_DISPATCH(update_floats), AdamWFactors<float>(step));
}

}  // namespace tessera
#endif
