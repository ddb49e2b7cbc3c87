// What the kernels do to a block: up to kBlock elements of the computing type C (float, or double where a double is
// involved), vector-aligned, small enough for L1, with room for a multiple of kColumns elements. A remainder goes through
// padded copies and the same vector operations, so that a value never depends on where an interval was cut. Compiled once
// for each SIMD target. Compile with -ffp-contract=off: where a compiler fuses a product into a sum, targets that have the
// instruction would give other bits than those that do not. Fused on purpose is what says MulAdd.
#if defined(TESSERA_COMM_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_COMM_BLOCK_INL_H_
#undef TESSERA_COMM_BLOCK_INL_H_
#else
#define TESSERA_COMM_BLOCK_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "tessera/base/types.h"
#include "tessera/comm/element-inl.h"
#include "tessera/comm/sum_kernel.h"
#include "tessera/comm/writing.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::HWY_NAMESPACE {

inline constexpr int64_t kBlock = 2048;
inline constexpr int64_t kColumns = 64;  ///< partial sums of squares; a multiple of every vector's length

/// Calls function<E>() for the kind E of `element`. A C of float leaves out float64, which needs double.
template <class C, class Function>
void for_element(Element element, const Function& function) {
  switch (element) {
    case Element::float32:
      return function.template operator()<Element::float32>();
    case Element::bfloat16:
      return function.template operator()<Element::bfloat16>();
    case Element::float16:
      return function.template operator()<Element::float16>();
    case Element::float64:
      if constexpr (std::is_same_v<C, double>) return function.template operator()<Element::float64>();
  }
}

template <Element E, class C>
HWY_NOINLINE void sum_block(std::span<const void* const> sources, int64_t begin, int64_t n, C scale, C* HWY_RESTRICT block) {
  const hn::ScalableTag<C> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto factor = hn::Set(d, scale);
  const auto source = [&](size_t r) { return static_cast<const Storage<E>*>(sources[r]) + begin; };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const Storage<E>* from = source(0) + i;
    auto sum0 = load<E>(d, from), sum1 = load<E>(d, from + lanes);
    auto sum2 = load<E>(d, from + 2 * lanes), sum3 = load<E>(d, from + 3 * lanes);
    for (size_t r = 1; r < sources.size(); ++r) {
      from = source(r) + i;
      sum0 = hn::Add(sum0, load<E>(d, from));
      sum1 = hn::Add(sum1, load<E>(d, from + lanes));
      sum2 = hn::Add(sum2, load<E>(d, from + 2 * lanes));
      sum3 = hn::Add(sum3, load<E>(d, from + 3 * lanes));
    }
    hn::Store(hn::Mul(sum0, factor), d, block + i);
    hn::Store(hn::Mul(sum1, factor), d, block + i + lanes);
    hn::Store(hn::Mul(sum2, factor), d, block + i + 2 * lanes);
    hn::Store(hn::Mul(sum3, factor), d, block + i + 3 * lanes);
  }
  for (; i < n; i += lanes) {
    const size_t bytes = static_cast<size_t>(std::min(lanes, n - i)) * sizeof(Storage<E>);
    Storage<E> padded[kColumns] = {};
    std::memcpy(padded, source(0) + i, bytes);
    auto sum = load<E>(d, padded);
    for (size_t r = 1; r < sources.size(); ++r) {
      std::memcpy(padded, source(r) + i, bytes);
      sum = hn::Add(sum, load<E>(d, padded));
    }
    hn::Store(hn::Mul(sum, factor), d, block + i);
  }
}

/// block[i] = scale · Σ sources[r][begin + i], in order of r, for i in [0, n); zeros up to the next multiple of kColumns.
template <class C>
void sum_block(const SumSources& from, int64_t begin, int64_t n, C scale, C* block) {
  if (!from.sources.empty())
    for_element<C>(from.element, [&]<Element E>() { sum_block<E, C>(from.sources, begin, n, scale, block); });
  const int64_t summed = from.sources.empty() ? 0 : n;
  std::fill(block + summed, block + round_up(n, kColumns), C(0));
}

template <Element E, class C>
HWY_NOINLINE void add_block(const Storage<E>* from, int64_t n, C* HWY_RESTRICT block) {
  const hn::ScalableTag<C> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::Store(hn::Add(hn::Load(d, block + i), load<E>(d, from + i)), d, block + i);
  if (i == n) return;
  Storage<E> padded[kColumns] = {};
  std::memcpy(padded, from + i, static_cast<size_t>(n - i) * sizeof(Storage<E>));
  hn::Store(hn::Add(hn::Load(d, block + i), load<E>(d, padded)), d, block + i);
}

/// block[i] += from[i] for i in [0, n).
template <class C>
void add_block(const void* from, Element element, int64_t n, C* block) {
  for_element<C>(element, [&]<Element E>() { add_block<E, C>(static_cast<const Storage<E>*>(from), n, block); });
}

template <Element E>
HWY_NOINLINE void round_block(const float* HWY_RESTRICT block, int64_t n, Storage<E>* HWY_RESTRICT rounded) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; i += lanes) store<E>(d, hn::Load(d, block + i), rounded + i);
}

/// The float beside `value` towards zero, made odd if `value` lies between two floats. A float has more than two bits more
/// than the 16-bit kinds, so that rounding this to them is rounding `value` once (Boldo & Melquiond 2008, "Emulation of FMA
/// and correctly rounded sums: proved algorithms using rounding to odd").
inline float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (std::isnan(value) || nearest == value) return nearest;
  uint32_t bits;
  std::memcpy(&bits, &nearest, sizeof(bits));
  if (std::fabs(nearest) > std::fabs(value)) --bits;
  bits |= 1u;
  float odd;
  std::memcpy(&odd, &bits, sizeof(odd));
  return odd;
}

template <Element E>
void round_block(const double* HWY_RESTRICT block, int64_t n, Storage<E>* HWY_RESTRICT rounded) {
  HWY_ALIGN_MAX float narrow[kColumns];
  for (int64_t i = 0; i < n; i += kColumns) {
    for (int64_t j = 0; j < kColumns; ++j)
      narrow[j] = E == Element::float32 ? static_cast<float>(block[i + j]) : round_to_odd(block[i + j]);
    round_block<E>(narrow, kColumns, rounded + i);
  }
}

/// A block's elements as they are stored: the block itself, or in `room` (as large) rounded once, to nearest even.
template <class C>
const void* rounded_block(const C* block, Element element, int64_t n, C* room) {
  if (size_of(element) == sizeof(C)) return block;
  for_element<C>(element, [&]<Element E>() {
    if constexpr (!std::is_same_v<C, Storage<E>>) round_block<E>(block, n, reinterpret_cast<Storage<E>*>(room));
  });
  return room;
}

/// memcpy with stores that pass the caches by, for what is not read soon: it saves reading the lines that are overwritten.
/// To be followed by hwy::FlushStream() before other threads or processes are told.
HWY_NOINLINE inline void stream_bytes(const void* from, void* to, int64_t bytes) {
  const hn::CappedTag<uint8_t, 64> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* source = static_cast<const uint8_t*>(from);
  auto* target = static_cast<uint8_t*>(to);
  int64_t i = std::min(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % 64));
  std::memcpy(target, source, static_cast<size_t>(i));
  for (; i + lanes <= bytes; i += lanes) hn::Stream(hn::LoadU(d, source + i), d, target + i);
  std::memcpy(target + i, source + i, static_cast<size_t>(bytes - i));
}

/// Writes `bytes` of a block to where they belong.
inline void write_bytes(const void* from, void* to, int64_t bytes, Writing writing) {
  if (writing == Writing::streamed) return stream_bytes(from, to, bytes);
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

/// Σ block[i]² for i in [0, n), in double, where block is zero from n to the next multiple of kColumns. The order depends on
/// nothing but n: kColumns sums, each of every kColumns-th square, then their sum by halves.
template <class C>
HWY_NOINLINE double squares_of(const C* HWY_RESTRICT block, int64_t n) {
  const hn::CappedTag<double, kColumns / 4> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr Element kind = std::is_same_v<C, float> ? Element::float32 : Element::float64;
  HWY_ALIGN_MAX double columns[kColumns];
  for (int64_t c = 0; c < kColumns; c += 4 * lanes) {
    auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
    for (int64_t i = c; i < n; i += kColumns) {
      const auto v0 = load<kind>(d, block + i), v1 = load<kind>(d, block + i + lanes);
      const auto v2 = load<kind>(d, block + i + 2 * lanes), v3 = load<kind>(d, block + i + 3 * lanes);
      sum0 = hn::Add(sum0, hn::Mul(v0, v0));
      sum1 = hn::Add(sum1, hn::Mul(v1, v1));
      sum2 = hn::Add(sum2, hn::Mul(v2, v2));
      sum3 = hn::Add(sum3, hn::Mul(v3, v3));
    }
    hn::Store(sum0, d, columns + c);
    hn::Store(sum1, d, columns + c + lanes);
    hn::Store(sum2, d, columns + c + 2 * lanes);
    hn::Store(sum3, d, columns + c + 3 * lanes);
  }
  for (int64_t width = kColumns / 2; width > 0; width /= 2)
    for (int64_t c = 0; c < width; ++c) columns[c] += columns[c + width];
  return columns[0];
}

}  // namespace tessera::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
