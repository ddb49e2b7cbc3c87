#include "tessera/comm/sum_kernel.h"

#include "tessera/base/check.h"
#include "tessera/base/text.h"
#include "tessera/comm/parallel_chunks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/comm/sum_kernel.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "tessera/comm/block-inl.h"

#ifndef TESSERA_COMM_SUM_KERNEL_SUM_
#define TESSERA_COMM_SUM_KERNEL_SUM_
namespace tessera {

/// The arguments of sum_sources.
struct Sum {
  SumSources from;
  double scale;
  bool accumulate;
  void* out;
  Element out_element;
  Writing writing;
};

}  // namespace tessera
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::HWY_NAMESPACE {

/// sum_sources of the elements [begin, end), block by block in the computing type C. Returns Σ out².
template <class C>
double sum_range(const Sum& sum, int64_t begin, int64_t end) {
  HWY_ALIGN_MAX C block[kBlock];
  HWY_ALIGN_MAX C room[kBlock];
  const int64_t size = size_of(sum.out_element);
  double squares = 0;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    void* to = static_cast<std::byte*>(sum.out) + i * size;
    sum_block(sum.from, i, n, static_cast<C>(sum.scale), block);
    if (sum.accumulate) add_block(to, sum.out_element, n, block);
    const void* const stored[] = {rounded_block(block, sum.out_element, n, room)};
    write_bytes(stored[0], to, n * size, sum.writing);
    if (stored[0] != block) sum_block({stored, sum.out_element}, 0, n, C(1), block);
    squares += squares_of(block, n);
  }
  if (sum.writing == Writing::streamed) hwy::FlushStream();
  return squares;
}

double sum_floats(const Sum& sum, int64_t begin, int64_t end) { return sum_range<float>(sum, begin, end); }
double sum_doubles(const Sum& sum, int64_t begin, int64_t end) { return sum_range<double>(sum, begin, end); }

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
  const bool reads_out = accumulate || std::ranges::find(from.sources, out) != from.sources.end();
  const Sum sum{from, scale,       accumulate,
                out,  out_element, reads_out ? Writing::cached : writing_of(count * size_of(out_element))};
  const auto range = in_double ? HWY_DYNAMIC_DISPATCH(sum_doubles) : HWY_DYNAMIC_DISPATCH(sum_floats);
  return {sum_over_chunks(count, [&](int64_t begin, int64_t end) { return range(sum, begin, end); })};
}

}  // namespace tessera
#endif
