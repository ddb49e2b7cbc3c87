#pragma once

#include <string>
#include <utility>

namespace tessera {

/// Whether every rank of the axis keeps all of something, or each its part.
enum class Placement { replicated, sharded };

/// Where each kind of model state lies. A strategy is such a value and nothing else.
struct Placements {
  Placement parameter = Placement::replicated;
  Placement gradient = Placement::replicated;
  Placement optimizer = Placement::replicated;
  /// What is sharded is sharded along `shard_axis` and replicated along `replicate_axis`; both empty: over all ranks.
  std::string shard_axis = {};
  std::string replicate_axis = {};
  bool optimizer_over_both = false;  ///< optimizer state is sharded over all ranks of both axes

  bool operator==(const Placements&) const = default;
};

/// Replicated data parallelism: every rank holds everything.
inline Placements ddp() { return {}; }
/// ZeRO stage 1: optimizer state sharded (Rajbhandari et al. 2020, section 5.1, P_os).
inline Placements zero1() { return {.optimizer = Placement::sharded}; }
/// ZeRO stage 2: gradients sharded too (P_os+g).
inline Placements zero2() { return {.gradient = Placement::sharded, .optimizer = Placement::sharded}; }
/// ZeRO stage 3, full sharding: parameters sharded too (P_os+g+p).
inline Placements zero3() { return {Placement::sharded, Placement::sharded, Placement::sharded}; }
/// Hybrid sharding (FSDP's HSDP; MiCS, Zhang et al. 2022): full sharding along `shard_axis`, replicas of that along
/// `replicate_axis`. The optimizer state is sharded along the first axis, or over both.
inline Placements hybrid(std::string shard_axis, std::string replicate_axis, bool optimizer_over_both = false) {
  return {Placement::sharded,    Placement::sharded,        Placement::sharded,
          std::move(shard_axis), std::move(replicate_axis), optimizer_over_both};
}

/// The placements called "ddp", "zero1", "zero2" or "zero3". Throws ConfigError listing these for another name.
Placements placements_named(const std::string& name);

/// The inverse of placements_named, "hybrid(shard axis, replicate axis)", or "parameter=…, gradient=…, optimizer=…".
std::string name_of(const Placements& placements);

/// Throws ConfigError unless what is sharded later in the list parameter, gradient, optimizer follows from what is
/// sharded before it: a rank can't update a shard without owning its state.
void check(const Placements& placements);

}  // namespace tessera
