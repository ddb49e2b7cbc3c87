#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/base/environment.h"
#include "tessera/layout/placements.h"
#include "tests/support/on_ranks.h"

namespace tessera::test {

/// A way to make a draw simpler. A draw type may have `static std::vector<Simpler<Draw>> simpler()`: the ways of its own,
/// beside those for random nets on random ranks in random placements.
template <class Draw>
struct Simpler {
  std::string name;
  std::function<void(Draw&)> apply;  ///< changes nothing if the draw is as simple already
};

template <class Draw>
std::vector<Simpler<Draw>> ways_to_simplify() {
  if constexpr (!requires { Draw::simpler(); })
    return {};
  else {
    std::vector<Simpler<Draw>> ways = {
        {"one-rank", [](Draw& d) { d.ranks = d.replicas = 1; }},
        {"two-ranks", [](Draw& d) { d.ranks = std::min(d.ranks, 2), d.replicas = std::min(d.replicas, d.ranks); }},
        {"fewer-stages",
         [](Draw& d) {
           for (const auto before = d.description(); d.net.most_stages > 0 && d.description() == before;)
             --d.net.most_stages;
         }},
        {"zero3", [](Draw& d) { d.placements = zero3(), d.replicas = 1; }},
        {"none-optional", [](Draw& d) { d.net.optional = false; }},
        {"none-frozen", [](Draw& d) { d.net.frozen = false; }}};
    for (auto& way : Draw::simpler()) ways.push_back(std::move(way));
    return ways;
  }
}

/// The smallest draw found by these ways of which `fails` is still true, and the names of the ways. Each is tried until
/// nothing helps any more.
template <class Draw>
std::pair<Draw, std::string> shrunk(Draw draw, const std::function<bool(const Draw&)>& fails) {
  std::string names;
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (const auto& way : ways_to_simplify<Draw>()) {
      Draw other = draw;
      way.apply(other);
      if (other.description() == draw.description() || !fails(other)) continue;
      draw = other;
      names += (names.empty() ? "" : ",") + way.name;
      smaller = true;
    }
  }
  return {draw, names};
}

/// The ways named in TESSERA_TEST_SIMPLER, in that order.
template <class Draw>
void simplify_as_asked(Draw& draw) {
  std::istringstream names(environment("TESSERA_TEST_SIMPLER").value_or(""));
  for (std::string name; std::getline(names, name, ',');)
    for (const auto& way : ways_to_simplify<Draw>())
      if (way.name == name) way.apply(draw);
}

/// Runs `compare(draw, world)` in forked ranks for as many draws as TESSERA_TEST_DRAWS says (else `usual`), from the seed in
/// TESSERA_TEST_SEED (then alone, unless a number is given, too) or a random one, up to the first that fails. That one is
/// shrunk, and how to repeat it is printed.
template <class Draw, class Compare>
void for_each_draw(int64_t usual, const Compare& compare) {
  at::set_num_threads(1);
  const auto draws = environment_integer("TESSERA_TEST_DRAWS").value_or(environment("TESSERA_TEST_SEED") ? 1 : usual);
  const auto first = static_cast<uint64_t>(environment_integer("TESSERA_TEST_SEED").value_or(std::random_device()()));
  std::cout << draws << " draws from TESSERA_TEST_SEED=" << first << std::endl;
  std::vector<RankEnd> ends;
  const std::function<bool(const Draw&)> fails = [&](const Draw& draw) {
    ends = run_ranks(draw.ranks, [&](World world) { compare(draw, world); });
    return std::any_of(ends.begin(), ends.end(), [](const RankEnd& end) { return end.exit_code != 0 || end.signal != 0; });
  };
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(draws); ++seed) {
    Draw draw(seed);
    simplify_as_asked(draw);
    if (!fails(draw)) continue;
    std::cout << "Fails: " << draw.description() << std::endl;
    for (size_t r = 0; r < ends.size(); ++r)
      std::cout << "rank " << r << " ended with exit code " << ends[r].exit_code << ", signal " << ends[r].signal << " "
                << ends[r].error << std::endl;
    const auto [small, ways] = shrunk<Draw>(draw, fails);
    std::cout << "Shrunk: TESSERA_TEST_SIMPLER=" << ways << " " << small.description() << std::endl;
    SCOPED_TRACE("TESSERA_TEST_SIMPLER=" + ways + " " + small.description());
    on_ranks(small.ranks, [&](World world) { compare(small, world); });
    ADD_FAILURE() << "failed as drawn: " << draw.description();
    return;  // forked ranks would inherit the failure
  }
}

}  // namespace tessera::test
