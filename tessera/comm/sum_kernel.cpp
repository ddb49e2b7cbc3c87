#include "tessera/comm/sum_kernel.h"

#include <algorithm>

#include "tessera/base/check.h"
#include "tessera/base/text.h"
#include "tessera/comm/parallel_chunks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/comm/sum_kernel.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "tessera/comm/sum-inl.h"

#ifndef TESSERA_COMM_SUM_KERNEL_ARGUMENTS_
#define TESSERA_COMM_SUM_KERNEL_ARGUMENTS_
namespace tessera {

/// The arguments of sum_sources.
struct SumArguments {
  SumSources from;
  double scale;
  bool accumulate;
  void* out;
  Element out_element;
};

}  // namespace tessera
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::HWY_NAMESPACE {

/// sum_sources of the elements [begin, end). Returns Σ out². One loop with all streams in it: taken apart into passes over a
/// block in L1, memory idles during each pass that does not read it, and the whole takes up to twice as long.
template <Element In, Element Out, class C>
double sum_range(const SumArguments& sum, int64_t begin, int64_t end) {
  const Tag<C> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto scale = hn::Set(d, static_cast<C>(sum.scale));
  auto* out = static_cast<Storage<Out>*>(sum.out);
  HWY_ALIGN_MAX C stored[kMaxLanes];
  Squares squares;
  for (int64_t i = begin; i < end; i += lanes) {
    const int64_t n = std::min(lanes, end - i);
    auto value = hn::Mul(sum_vector<In>(d, sum.from.sources, i, n), scale);
    if (sum.accumulate) value = hn::Add(value, load_first<Out>(d, n, out + i));
    store_first<Out>(d, n, value, out + i);
    if constexpr (!std::is_same_v<Storage<Out>, C>) value = load_first<Out>(d, n, out + i);
    hn::Store(value, d, stored);
    squares.add(stored, lanes, i);
  }
  return squares.total();
}

template <class C>
double sum_range(const SumArguments& sum, int64_t begin, int64_t end) {
  double squares = 0;
  for_element<C>(sum.from.element, [&]<Element In>() {
    for_element<C>(sum.out_element, [&]<Element Out>() {
      constexpr bool in_double = In == Element::float64 || Out == Element::float64;
      if constexpr (in_double == std::is_same_v<C, double>) squares = sum_range<In, Out, C>(sum, begin, end);
    });
  });
  return squares;
}

double sum_floats(const SumArguments& sum, int64_t begin, int64_t end) { return sum_range<float>(sum, begin, end); }
double sum_doubles(const SumArguments& sum, int64_t begin, int64_t end) { return sum_range<double>(sum, begin, end); }

}  // namespace tessera::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {

HWY_EXPORT(sum_floats);
HWY_EXPORT(sum_doubles);

int64_t size_of(Element element) {
  switch (element) {
    case Element::float32:
      return 4;
    case Element::float64:
      return 8;
    case Element::bfloat16:
    case Element::float16:
      return 2;
  }
  TESSERA_CHECK(false, text("no such element type: ", static_cast<int>(element)));
}

SumResult sum_sources(const SumSources& from, double scale, bool accumulate, void* out, Element out_element, int64_t count) {
  TESSERA_CHECK(count >= 0, text("a sum of ", count, " elements"));
  const bool in_double = from.element == Element::float64 || out_element == Element::float64;
  const auto range = in_double ? HWY_DYNAMIC_DISPATCH(sum_doubles) : HWY_DYNAMIC_DISPATCH(sum_floats);
  const SumArguments sum{from, scale, accumulate, out, out_element};
  return {sum_over_chunks(count, [&](int64_t begin, int64_t end) { return range(sum, begin, end); })};
}

}  // namespace tessera
#endif
