#pragma once

#include <cstdint>

namespace tessera::models {

/// The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): a bijection of
/// 64 bits whose outputs on 0, 1, 2, … pass statistical tests.
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// Random bits number `counter` of stream `stream` of `seed`. A function of these three alone: it has no state, so ranks
/// that share a seed agree without a message, and any number can be had without those before it.
constexpr uint64_t counter_random(uint64_t seed, uint64_t stream, uint64_t counter) {
  return mix(mix(mix(seed) ^ stream) ^ counter);
}

/// Maps 64 random bits to 0 … bound − 1 (bound < 2³²) by their upper half times the bound; the bias is below bound · 2⁻³².
constexpr int64_t scale_to(uint64_t bits, int64_t bound) {
  return static_cast<int64_t>(((bits >> 32) * static_cast<uint64_t>(bound)) >> 32);
}

}  // namespace tessera::models
