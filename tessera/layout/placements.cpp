#include "tessera/layout/placements.h"

#include <array>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

const std::array<std::pair<const char*, Placements>, 4> kNamed = {
    {{"ddp", ddp()}, {"zero1", zero1()}, {"zero2", zero2()}, {"zero3", zero3()}}};

const char* word(Placement placement) { return placement == Placement::sharded ? "sharded" : "replicated"; }

}  // namespace

Placements placements_named(const std::string& name) {
  for (const auto& [known, placements] : kNamed)
    if (name == known) return placements;
  throw ConfigError(text("there is no placement '", name, "'; known are ddp, zero1, zero2, zero3"));
}

std::string name_of(const Placements& placements) {
  for (const auto& [known, value] : kNamed)
    if (placements == value) return known;
  if (!placements.shard_axis.empty() &&
      placements == hybrid(placements.shard_axis, placements.replicate_axis, placements.optimizer_over_both))
    return text("hybrid(", placements.shard_axis, ", ", placements.replicate_axis,
                placements.optimizer_over_both ? ", optimizer over both)" : ")");
  return text("parameter=", word(placements.parameter), ", gradient=", word(placements.gradient),
              ", optimizer=", word(placements.optimizer));
}

void check(const Placements& placements) {
  const bool follows = (placements.parameter == Placement::replicated || placements.gradient == Placement::sharded) &&
                       (placements.gradient == Placement::replicated || placements.optimizer == Placement::sharded);
  if (placements.shard_axis.empty() != placements.replicate_axis.empty())
    throw ConfigError(text("hybrid placement needs the names of both axes, but has '", placements.shard_axis, "' and '",
                           placements.replicate_axis, "'"));
  if (!follows)
    throw ConfigError(
        text("the placement ", name_of(placements),
             " can't be: sharded parameters need sharded gradients, and sharded gradients need a sharded optimizer"));
}

}  // namespace tessera
