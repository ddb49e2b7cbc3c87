#include "tessera/mesh/mesh.h"

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

Mesh::Mesh(World world) : Mesh(world, {{"data", world.size}}) {}

Mesh::Mesh(World world, std::vector<Axis> axes) : world_(std::move(world)), axes_(std::move(axes)) {
  int64_t product = 1;
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name.empty()) throw ConfigError(text("axis ", i, " of the mesh has no name"));
    if (axes_[i].size < 1)
      throw ConfigError(text("axis '", axes_[i].name, "' of the mesh must have at least 1 rank, but has ", axes_[i].size));
    for (size_t j = 0; j < i; ++j)
      if (axes_[j].name == axes_[i].name) throw ConfigError(text("the mesh has two axes named '", axes_[i].name, "'"));
    product *= axes_[i].size;
  }
  if (product != world_.size)
    throw ConfigError(text("the axes of the mesh multiply to ", product, " ranks, but the world has ", world_.size));
}

size_t Mesh::index_of(const std::string& axis) const {
  std::string known;
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == axis) return i;
    known += (i ? ", '" : "'") + axes_[i].name + "'";
  }
  throw ConfigError(text("the mesh has no axis '", axis, "'; it has ", known));
}

int Mesh::stride(size_t axis) const {
  int stride = 1;
  for (size_t i = axis + 1; i < axes_.size(); ++i) stride *= axes_[i].size;
  return stride;
}

int Mesh::size(const std::string& axis) const { return axes_[index_of(axis)].size; }

Rank Mesh::coordinate(const std::string& axis) const {
  const size_t index = index_of(axis);
  return Rank(world_.rank.value / stride(index) % axes_[index].size);
}

std::vector<Rank> Mesh::peers(const std::string& axis) const {
  const size_t index = index_of(axis);
  const int first = world_.rank.value - coordinate(axis).value * stride(index);
  std::vector<Rank> peers;
  for (int i = 0; i < axes_[index].size; ++i) peers.emplace_back(first + i * stride(index));
  return peers;
}

}  // namespace tessera
