#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <iostream>
#include <random>

#include "tessera/base/environment.h"
#include "tests/support/on_ranks.h"

namespace tessera::test {

/// Runs `compare(draw, world)` in forked ranks for as many draws as TESSERA_TEST_DRAWS says (else `usual`), from the seed in
/// TESSERA_TEST_SEED (then alone, unless a number is given, too) or a random one, up to the first that fails.
template <class Draw, class Compare>
void for_each_draw(int64_t usual, const Compare& compare) {
  at::set_num_threads(1);
  const auto draws = environment_integer("TESSERA_TEST_DRAWS").value_or(environment("TESSERA_TEST_SEED") ? 1 : usual);
  const auto first = static_cast<uint64_t>(environment_integer("TESSERA_TEST_SEED").value_or(std::random_device()()));
  std::cout << draws << " draws from TESSERA_TEST_SEED=" << first << std::endl;
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(draws); ++seed) {
    const Draw draw(seed);
    SCOPED_TRACE(draw.description());
    on_ranks(draw.ranks, [&](World world) { compare(draw, world); });
    if (testing::Test::HasFailure()) return;  // forked ranks would inherit it
  }
}

}  // namespace tessera::test
