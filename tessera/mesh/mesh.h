#pragma once

#include <string>
#include <vector>

#include "tessera/mesh/world.h"

namespace tessera {

/// One named axis of a mesh and its number of ranks.
struct Axis {
  std::string name;
  int size;
};

/// The ranks of a world arranged as named axes, the last axis varying fastest (row-major). A value.
class Mesh {
 public:
  /// All ranks along one axis named "data".
  explicit Mesh(World world);

  /// Throws ConfigError if an axis is unnamed, named twice or smaller than 1, or if the sizes don't multiply to the world's
  /// size.
  Mesh(World world, std::vector<Axis> axes);

  const World& world() const { return world_; }
  const std::vector<Axis>& axes() const { return axes_; }

  /// Ranks along `axis`. Throws ConfigError naming the known axes if there is none of that name.
  int size(const std::string& axis) const;

  /// This process's place along `axis`.
  Rank coordinate(const std::string& axis) const;

  /// World ranks that differ from this process only along `axis`, in order of that axis; this process is one of them.
  std::vector<Rank> peers(const std::string& axis) const;

 private:
  size_t index_of(const std::string& axis) const;
  int stride(size_t axis) const;

  World world_;
  std::vector<Axis> axes_;
};

}  // namespace tessera
