#include "tessera/layout/division.h"

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

// Places along the shard axis, and each rank's place there and along the rest.
struct Grid {
  int shards;
  std::vector<int> slots;
};

Grid one_axis(const Placements& placements, const Mesh& mesh) {
  std::string several;
  int count = 0;
  for (const auto& axis : mesh.axes())
    if (axis.size > 1) several += text(count++ > 0 ? ", '" : "'", axis.name, "' (", axis.size, ")");
  if (count > 1 && placements.optimizer != Placement::replicated)
    throw ConfigError(text("placement ", name_of(placements), " shards over one axis, but the mesh has several: ", several,
                           "; use hybrid(shard_axis, replicate_axis), or a mesh with one axis of more than one rank"));
  Grid grid{mesh.world().size, {}};
  for (int rank = 0; rank < mesh.world().size; ++rank) grid.slots.push_back(rank);
  return grid;
}

Grid two_axes(const Placements& placements, const Mesh& mesh) {
  const int shards = mesh.size(placements.shard_axis), replicas = mesh.size(placements.replicate_axis);
  if (placements.shard_axis == placements.replicate_axis)
    throw ConfigError(text("hybrid placement can't shard and replicate over the same axis '", placements.shard_axis, "'"));
  if (shards * replicas != mesh.world().size)
    throw ConfigError(text("hybrid placement over the axes '", placements.shard_axis, "' (", shards, ") and '",
                           placements.replicate_axis, "' (", replicas, ") leaves out other axes of the mesh, which has ",
                           mesh.world().size, " ranks"));
  Grid grid{shards, {}};
  for (int rank = 0; rank < mesh.world().size; ++rank) {
    World there = mesh.world();
    there.rank = Rank(rank);
    const Mesh view(there, mesh.axes());
    grid.slots.push_back(view.coordinate(placements.shard_axis).value * replicas +
                         view.coordinate(placements.replicate_axis).value);
  }
  return grid;
}

}  // namespace

Division::Division(const Placements& placements, const Mesh& mesh) {
  const bool hybrid = !placements.shard_axis.empty();
  const Grid grid = hybrid ? two_axes(placements, mesh) : one_axis(placements, mesh);
  slots_ = grid.slots;
  if (placements.parameter == Placement::sharded) parameter_parts_ = grid.shards;
  if (placements.optimizer == Placement::sharded) optimizer_parts_ = placements.optimizer_over_both ? ranks() : grid.shards;
}

std::vector<Run> Division::held(const Layout& layout, ParameterIndex p, Rank rank) const {
  return layout.runs(p, parameter_part(rank), parameter_parts_);
}

std::vector<Run> Division::updated(const Layout& layout, ParameterIndex p, Rank rank) const {
  return layout.runs(p, optimizer_part(rank), optimizer_parts_);
}

std::vector<Run> Division::summed(const Layout& layout, ParameterIndex p, Rank rank) const {
  const int sharers = ranks() / optimizer_parts_;
  if (sharers == 1) return updated(layout, p, rank);
  const int64_t shard = layout.shard(optimizer_part(rank), optimizer_parts_).value;
  const int64_t each = round_up((shard + sharers - 1) / sharers, layout.grain());
  const int which = slot(rank) % sharers;
  return clip(updated(layout, p, rank), {each * which, each * (which + 1)});
}

}  // namespace tessera
