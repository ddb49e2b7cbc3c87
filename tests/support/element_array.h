#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "tessera/comm/sum_kernel.h"

namespace tessera {

/// The element at `at`, exactly.
inline double read(const void* at, Element element) {
  switch (element) {
    case Element::float32:
      return *static_cast<const float*>(at);
    case Element::float64:
      return *static_cast<const double*>(at);
    case Element::bfloat16:
      return static_cast<float>(*static_cast<const c10::BFloat16*>(at));
    case Element::float16:
      return static_cast<float>(*static_cast<const c10::Half*>(at));
  }
  return 0;
}

/// Rounds as c10 does; `value` is a float unless `element` is float64.
inline void write(void* at, Element element, double value) {
  switch (element) {
    case Element::float32:
      *static_cast<float*>(at) = static_cast<float>(value);
      break;
    case Element::float64:
      *static_cast<double*>(at) = value;
      break;
    case Element::bfloat16:
      *static_cast<c10::BFloat16*>(at) = c10::BFloat16(static_cast<float>(value));
      break;
    case Element::float16:
      *static_cast<c10::Half*>(at) = c10::Half(static_cast<float>(value));
      break;
  }
}

/// `count` elements at an address that is aligned to nothing but an element, between guards.
class Array {
 public:
  static constexpr int64_t kGuard = 80;  ///< elements on both sides that nothing may write

  Array(Element element, int64_t count, int64_t offset = 1)
      : element_(element),
        count_(count),
        offset_(kGuard + offset),
        bytes_(static_cast<size_t>((count + offset_ + kGuard) * size_of(element)), std::byte{0xA5}) {
    std::fill_n(at(0), count * size_of(element), std::byte{0});
  }

  static Array random(Element element, int64_t count, std::mt19937_64& generator, int64_t offset = 1) {
    Array array(element, count, offset);
    std::normal_distribution<double> distribution;
    for (int64_t i = 0; i < count; ++i) write(array.at(i), element, static_cast<float>(distribution(generator)));
    return array;
  }

  Element element() const { return element_; }
  std::byte* at(int64_t i) { return bytes_.data() + (i + offset_) * size_of(element_); }
  const std::byte* at(int64_t i) const { return bytes_.data() + (i + offset_) * size_of(element_); }
  double operator[](int64_t i) const { return read(at(i), element_); }
  int64_t count() const { return count_; }
  bool operator==(const Array& other) const = default;  ///< bits, guards included

 private:
  Element element_;
  int64_t count_, offset_;
  std::vector<std::byte> bytes_;
};

}  // namespace tessera
