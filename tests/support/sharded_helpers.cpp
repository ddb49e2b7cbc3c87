#include "tests/support/sharded_helpers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/support/on_ranks.h"

namespace tessera::test {

double mean_over_ranks(const Sharded& sharded, double value) {
  auto& communicator = sharded.engine().communicator();
  double sum = 0;
  for (const auto& bytes :
       communicator.all_gather("test value", std::string(reinterpret_cast<const char*>(&value), sizeof value))) {
    double theirs = 0;
    std::memcpy(&theirs, bytes.data(), sizeof theirs);
    sum += theirs;
  }
  return sum / communicator.size();
}

std::map<std::string, torch::Tensor> gradients_of(const Sharded& sharded) {
  std::map<std::string, torch::Tensor> gradients;
  for (auto& [name, gradient] : sharded.full_gradients()) gradients[name] = gradient;
  return gradients;
}

Sums sums_of(const Sharded& sharded) {
  Sums sums;
  for (const auto& [name, value] : sharded.full_parameters()) {
    sums.sum += value.to(torch::kDouble).sum().item<double>();
    sums.absolute += value.to(torch::kDouble).abs().sum().item<double>();
  }
  return sums;
}

void expect_all_sharded(const Sharded& sharded) {
  for (const auto& unit : sharded.engine().units()) EXPECT_EQ(unit->residency(), Residency::sharded) << unit->name();
}

Mesh mesh_for(const World& world, const Placements& placements) {
  if (placements.shard_axis.empty()) return Mesh(world);
  const int replicas = world.size % 2 == 0 ? 2 : 1;
  return {world, {{placements.replicate_axis, replicas}, {placements.shard_axis, world.size / replicas}}};
}

std::vector<Placements> every_placement() {
  return {ddp(), zero1(), zero2(), zero3(), hybrid("shard", "replicate"), hybrid("shard", "replicate", true)};
}

namespace {

// Sanitizers make ranks four times as slow, and look at how each does its work, not at how many there are: one number for
// each placement, that hybrids are hybrids with.
std::vector<int> ranks_to_run(const Placements& placements, const std::vector<int>& ranks) {
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TESSERA_SANITIZED
#endif
#endif
#if defined(TESSERA_SANITIZED) || defined(__SANITIZE_ADDRESS__)
  const auto distance = [&](int count) { return placements.shard_axis.empty() ? std::abs(count - 2) : -count; };
  return {*std::min_element(ranks.begin(), ranks.end(), [&](int a, int b) { return distance(a) < distance(b); })};
#else
  static_cast<void>(placements);
  return ranks;
#endif
}

}  // namespace

void for_every_placement(const std::function<void(World, const Placements&)>& body, std::initializer_list<int> ranks) {
  for (const auto& placements : every_placement())
    for (const int count : ranks_to_run(placements, ranks)) {
      SCOPED_TRACE(name_of(placements) + " on " + std::to_string(count) + " ranks");
      on_ranks(count, [&](World world) { body(world, placements); });
    }
}

}  // namespace tessera::test
