// Sums of sources, and of squares, a vector at a time. Compiled once for each SIMD target.
#if defined(TESSERA_COMM_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_COMM_SUM_INL_H_
#undef TESSERA_COMM_SUM_INL_H_
#else
#define TESSERA_COMM_SUM_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>

#include "hwy/highway.h"
#include "tessera/comm/element-inl.h"
#include "tessera/comm/sum_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::HWY_NAMESPACE {

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

/// Σ sources[r][i …], in order of r, for the first n lanes; zeros elsewhere.
template <Element E, class D>
HWY_INLINE hn::Vec<D> sum_vector(D d, std::span<const void* const> sources, int64_t i, int64_t n) {
  if (sources.empty()) return hn::Zero(d);
  const auto at = [&](size_t r) { return static_cast<const Storage<E>*>(sources[r]) + i; };
  auto sum = load_first<E>(d, n, at(0));
  for (size_t r = 1; r < sources.size(); ++r) sum = hn::Add(sum, load_first<E>(d, n, at(r)));
  return sum;
}

/// A sum of squares in double. In memory, and in many columns: adding to one does not wait for the addition before, whatever
/// the length of vectors, and the order is the same on all targets.
class Squares {
 public:
  /// Adds the squares of `lanes` values, the first of which is the i-th of all.
  template <class C>
  HWY_INLINE void add(const C* HWY_RESTRICT values, int64_t lanes, int64_t i) {
    constexpr Element kind = std::is_same_v<C, float> ? Element::float32 : Element::float64;
    const Tag<double> d;
    double* HWY_RESTRICT column = columns_ + i % kColumns;
    for (int64_t j = 0; j < lanes; j += static_cast<int64_t>(hn::Lanes(d))) {
      const auto value = load<kind>(d, values + j);
      hn::Store(hn::Add(hn::Load(d, column + j), hn::Mul(value, value)), d, column + j);
    }
  }

  double total() const {
    double sums[kColumns];
    std::copy_n(columns_, kColumns, sums);
    for (int64_t width = kColumns / 2; width > 0; width /= 2)
      for (int64_t c = 0; c < width; ++c) sums[c] += sums[c + width];
    return sums[0];
  }

 private:
  static constexpr int64_t kColumns = 64;
  HWY_ALIGN_MAX double columns_[kColumns] = {};
};

}  // namespace tessera::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
