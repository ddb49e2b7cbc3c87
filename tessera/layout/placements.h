#pragma once

#include <string>

namespace tessera {

/// Whether every rank of the axis keeps all of something, or each its part.
enum class Placement { replicated, sharded };

/// Where each kind of model state lies over the data axis. A strategy is such a value and nothing else.
struct Placements {
  Placement parameter = Placement::replicated;
  Placement gradient = Placement::replicated;
  Placement optimizer = Placement::replicated;

  bool operator==(const Placements&) const = default;
};

/// Replicated data parallelism: every rank holds everything.
constexpr Placements ddp() { return {}; }
/// ZeRO stage 1: optimizer state sharded (Rajbhandari et al. 2020, section 5.1, P_os).
constexpr Placements zero1() { return {.optimizer = Placement::sharded}; }
/// ZeRO stage 2: gradients sharded too (P_os+g).
constexpr Placements zero2() { return {.gradient = Placement::sharded, .optimizer = Placement::sharded}; }
/// ZeRO stage 3, full sharding: parameters sharded too (P_os+g+p).
constexpr Placements zero3() { return {Placement::sharded, Placement::sharded, Placement::sharded}; }

/// The placements called "ddp", "zero1", "zero2" or "zero3". Throws ConfigError listing these for another name.
Placements placements_named(const std::string& name);

/// The inverse of placements_named, or "parameter=…, gradient=…, optimizer=…" for a value that has no name.
std::string name_of(const Placements& placements);

/// Throws ConfigError unless what is sharded later in the list parameter, gradient, optimizer follows from what is
/// sharded before it: a rank can't update a shard without owning its state.
void check(const Placements& placements);

}  // namespace tessera
