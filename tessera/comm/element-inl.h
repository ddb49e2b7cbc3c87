// One vector of elements: loaded from and stored to each kind of element. Compiled once for each SIMD target (Highway's
// foreach_target.h includes it repeatedly, hence the toggled guard).
// Compile with -ffp-contract=off: where a compiler fuses a product into a sum, targets that have the instruction would give
// other bits than those that have not. Fused on purpose is what says MulAdd.
#if defined(TESSERA_COMM_ELEMENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_COMM_ELEMENT_INL_H_
#undef TESSERA_COMM_ELEMENT_INL_H_
#else
#define TESSERA_COMM_ELEMENT_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"
#include "tessera/comm/sum_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// What an element of each kind is stored as. The 16-bit kinds are handled as bits.
template <Element E>
using Storage =
    std::conditional_t<E == Element::float32, float, std::conditional_t<E == Element::float64, double, uint16_t>>;

inline constexpr size_t kMaxLanes = 16;

/// The vectors that are computed with. C is float, or double where a double is involved.
template <class C>
using Tag = hn::CappedTag<C, kMaxLanes>;

/// fp16 bits (zero-extended) to the float of the same value, exactly, by the method of github.com/Maratyszcza/FP16.
template <class D, class V>
HWY_INLINE hn::Vec<D> float_of_half(D d, V half) {
  const hn::RebindToUnsigned<D> du;
  const auto word = hn::ShiftLeft<16>(half);
  const auto magnitude = hn::Add(word, word);
  const auto normal =
      hn::Mul(hn::BitCast(d, hn::Add(hn::ShiftRight<4>(magnitude), hn::Set(du, 0xE0u << 23))), hn::Set(d, 0x1.0p-112f));
  const auto subnormal =
      hn::Sub(hn::BitCast(d, hn::Or(hn::ShiftRight<17>(magnitude), hn::Set(du, 126u << 23))), hn::Set(d, 0.5f));
  // magnitude < 2^27, by its upper five bits: not every target compares unsigned integers in one instruction.
  const auto is_subnormal = hn::Eq(hn::ShiftRight<27>(magnitude), hn::Zero(du));
  const auto value = hn::IfThenElse(hn::RebindMask(d, is_subnormal), subnormal, normal);
  return hn::Or(value, hn::BitCast(d, hn::And(word, hn::Set(du, 0x80000000u))));
}

/// float to fp16 bits in the lower half of each lane, rounded to nearest even, by the same method. A NaN becomes 0x7E00 or
/// 0xFE00.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> half_of_float(D d, hn::Vec<D> value) {
  const hn::RebindToUnsigned<D> du;
  const auto word = hn::BitCast(du, value);
  const auto sign = hn::And(hn::ShiftRight<16>(word), hn::Set(du, 0x8000u));
  const auto scaled = hn::Mul(hn::Mul(hn::Abs(value), hn::Set(d, 0x1.0p+112f)), hn::Set(d, 0x1.0p-110f));
  const auto exponent = hn::And(hn::Add(word, word), hn::Set(du, 0xFF000000u));
  const auto bias = hn::ShiftRight<1>(hn::Max(exponent, hn::Set(du, 0x71000000u)));
  const auto rounded = hn::BitCast(du, hn::Add(hn::BitCast(d, hn::Add(bias, hn::Set(du, 0x07800000u))), scaled));
  const auto bits =
      hn::Add(hn::And(hn::ShiftRight<13>(rounded), hn::Set(du, 0x7C00u)), hn::And(rounded, hn::Set(du, 0x0FFFu)));
  return hn::Or(sign, hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), hn::Set(du, 0x7E00u), bits));
}

/// float to bfloat16 bits in the lower half of each lane, rounded to nearest even. A NaN keeps its sign and upper payload
/// and becomes quiet. In integers, because the CPUs' own conversion flushes subnormals, and Highway's truncates.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> bfloat_of_float([[maybe_unused]] D d, hn::Vec<D> value) {
  const hn::RebindToUnsigned<D> du;
  const auto word = hn::BitCast(du, value);
  const auto upper = hn::ShiftRight<16>(word);
  const auto half_to_even = hn::Add(hn::And(upper, hn::Set(du, 1u)), hn::Set(du, 0x7FFFu));
  const auto rounded = hn::ShiftRight<16>(hn::Add(word, half_to_even));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), hn::Or(upper, hn::Set(du, 0x40u)), rounded);
}

/// One vector of floats or doubles from elements of kind E at any address. Exact; double to float is not offered.
template <Element E, class D>
HWY_INLINE hn::Vec<D> load(D d, const Storage<E>* from) {
  using C = hn::TFromD<D>;
  if constexpr (std::is_same_v<Storage<E>, C>) {
    return hn::LoadU(d, from);
  } else if constexpr (std::is_same_v<C, double>) {
    return hn::PromoteTo(d, load<E>(hn::Rebind<float, D>(), from));
  } else {
    const auto bits = hn::PromoteTo(hn::RebindToUnsigned<D>(), hn::LoadU(hn::Rebind<uint16_t, D>(), from));
    if constexpr (E == Element::bfloat16) {
      return hn::BitCast(d, hn::ShiftLeft<16>(bits));
    } else {
      return float_of_half(d, bits);
    }
  }
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

/// One vector to elements of kind E at any address, rounded once, to nearest even. Float to float64 is not offered.
template <Element E, class D>
HWY_INLINE void store(D d, hn::Vec<D> value, Storage<E>* to) {
  using C = hn::TFromD<D>;
  if constexpr (std::is_same_v<Storage<E>, C>) {
    hn::StoreU(value, d, to);
  } else if constexpr (std::is_same_v<C, double>) {
    // One by one, for it is rare: Highway's conversion clamps on some targets.
    HWY_ALIGN_MAX double wide[kMaxLanes];
    HWY_ALIGN_MAX float narrow[kMaxLanes];
    hn::Store(value, d, wide);
    for (size_t i = 0; i < hn::Lanes(d); ++i)
      narrow[i] = E == Element::float32 ? static_cast<float>(wide[i]) : round_to_odd(wide[i]);
    const hn::Rebind<float, D> df;
    store<E>(df, hn::LoadU(df, narrow), to);
  } else {
    const hn::Rebind<uint16_t, D> du16;
    const auto bits = E == Element::bfloat16 ? bfloat_of_float(d, value) : half_of_float(d, value);
    hn::StoreU(hn::DemoteTo(du16, hn::BitCast(hn::RebindToSigned<D>(), bits)), du16, to);
  }
}

/// `load` of the first n lanes; the others are zero.
template <Element E, class D>
HWY_INLINE hn::Vec<D> load_first(D d, int64_t n, const Storage<E>* from) {
  if (n == static_cast<int64_t>(hn::Lanes(d))) return load<E>(d, from);
  Storage<E> padded[kMaxLanes] = {};
  std::memcpy(padded, from, static_cast<size_t>(n) * sizeof(Storage<E>));
  return load<E>(d, padded);
}

/// `store` of the first n lanes.
template <Element E, class D>
HWY_INLINE void store_first(D d, int64_t n, hn::Vec<D> value, Storage<E>* to) {
  if (n == static_cast<int64_t>(hn::Lanes(d))) return store<E>(d, value, to);
  Storage<E> padded[kMaxLanes];
  store<E>(d, value, padded);
  std::memcpy(to, padded, static_cast<size_t>(n) * sizeof(Storage<E>));
}

}  // namespace tessera::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
