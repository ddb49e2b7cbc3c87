#pragma once

#include <compare>
#include <cstdint>

namespace tessera {

/// An integer with a meaning. Quantities of different meaning neither convert into nor mix with each other.
template <class Meaning>
struct Quantity {
  int64_t value = 0;

  constexpr Quantity() = default;
  constexpr explicit Quantity(int64_t v) : value(v) {}
  constexpr auto operator<=>(const Quantity&) const = default;

  constexpr Quantity& operator+=(Quantity other) {
    value += other.value;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity other) {
    value -= other.value;
    return *this;
  }
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return Quantity(a.value + b.value); }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return Quantity(a.value - b.value); }
  friend constexpr Quantity operator*(Quantity a, int64_t factor) { return Quantity(a.value * factor); }
};

using Bytes = Quantity<struct BytesMeaning>;  ///< a size in memory, in bytes
using Numel = Quantity<struct NumelMeaning>;  ///< a count of tensor elements, whatever their dtype

/// Position of a process in the world, or in one axis of a mesh: 0 … size − 1. Not a quantity: ranks are not added.
struct Rank {
  int value = 0;
  constexpr Rank() = default;
  constexpr explicit Rank(int v) : value(v) {}
  constexpr auto operator<=>(const Rank&) const = default;
};

/// The size in bytes of `count` elements of `element_size` bytes each.
constexpr Bytes size_of(Numel count, int64_t element_size) { return Bytes(count.value * element_size); }

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace tessera
