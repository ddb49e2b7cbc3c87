#include "tessera/layout/partition_spec.h"

#include <algorithm>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/pattern.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

using Axes = std::set<std::string>;

// The one divided dim of a spec and the axes that it is divided over.
struct Divided {
  int64_t dim = 0;
  Axes axes;
};

class Reader {
 public:
  Reader(const std::string& parameter, const std::vector<int64_t>& shape, const Mesh& mesh)
      : parameter_(parameter), shape_(shape), mesh_(mesh) {}

  Divided read(const char* what, const PartitionSpec& spec) const {
    const auto fault = [&](const auto&... words) {
      throw ConfigError(text("the ", what, " of '", parameter_, "' is annotated ", name_of(spec), words...));
    };
    Divided divided;
    for (size_t dim = 0; dim < spec.dims.size(); ++dim) {
      for (const auto& axis : spec.dims[dim].axes) {
        if (!known(axis)) fault(", but the mesh has no axis '", axis, "'; its axes are ", axes_of_mesh());
        if (!divided.axes.insert(axis).second) fault(", which names the axis '", axis, "' twice");
      }
      if (spec.dims[dim].axes.empty()) continue;
      if (dim >= shape_.size())
        fault(", which divides dim ", dim, ", but the parameter has ", shape_.size(), " dims; annotate it P()");
      if (divided_before_) fault("; parameters can be divided along one dim only");
      divided_before_ = true;
      divided.dim = static_cast<int64_t>(dim);
    }
    divided_before_ = false;
    return divided;
  }

  int ranks(const Axes& axes) const {
    int count = 1;
    for (const auto& axis : axes) count *= mesh_.size(axis);
    return count;
  }
  bool all(const Axes& axes) const { return ranks(axes) == mesh_.world().size; }

  // The axis that is left when `axis` is taken away, besides those of one rank.
  std::string rest(const std::string& axis) const {
    std::string found, any;
    for (const auto& each : mesh_.axes()) {
      if (each.name == axis) continue;
      any = each.name;
      if (each.size > 1 && !found.empty())
        throw ConfigError(text("'", parameter_, "' is divided over the axis '", axis,
                               "' of a mesh that has two others of more than one rank, '", found, "' and '", each.name,
                               "'; only meshes of two such axes can be divided in part"));
      if (each.size > 1) found = each.name;
    }
    return found.empty() ? any : found;
  }

  const Mesh& mesh() const { return mesh_; }

 private:
  bool known(const std::string& axis) const {
    return std::any_of(mesh_.axes().begin(), mesh_.axes().end(), [&](const Axis& each) { return each.name == axis; });
  }
  std::string axes_of_mesh() const {
    std::string words;
    for (const auto& axis : mesh_.axes()) words += text(words.empty() ? "'" : ", '", axis.name, "' (", axis.size, ")");
    return words;
  }

  const std::string& parameter_;
  const std::vector<int64_t>& shape_;
  const Mesh& mesh_;
  mutable bool divided_before_ = false;
};

}  // namespace

PartitionSpec P(DividedOver first, DividedOver second, DividedOver third, DividedOver fourth) {
  PartitionSpec spec{{std::move(first), std::move(second), std::move(third), std::move(fourth)}};
  while (!spec.dims.empty() && spec.dims.back().axes.empty()) spec.dims.pop_back();
  return spec;
}

std::string name_of(const PartitionSpec& spec) {
  std::string words;
  for (const auto& dim : spec.dims) {
    std::string axes;
    for (const auto& axis : dim.axes) axes += text(axes.empty() ? "" : " x ", axis);
    words += text(words.empty() ? "" : ", ", axes.empty() ? "null" : axes);
  }
  return text("P(", words, ")");
}

Rule rule_of(const std::string& parameter, const std::vector<int64_t>& shape, const PartitionSpec& spec,
             const PartitionSpec& state, const Mesh& mesh) {
  const Reader reader(parameter, shape, mesh);
  const Divided values = reader.read("values", spec), kept = reader.read("optimizer state", state);
  const auto fault = [&](const char* why) {
    throw ConfigError(
        text("'", parameter, "' is annotated ", name_of(spec), " and its optimizer state ", name_of(state), ": ", why));
  };
  const auto rule = [&](const Placements& placements, const Mesh& over) {
    return Rule{placements, Division(placements, over), state.whole() ? flat() : per_parameter(kept.dim)};
  };
  const Mesh one_axis(mesh.world());
  if (spec.whole() && state.whole()) return rule(ddp(), one_axis);
  if (state.whole()) fault("a rank that has a part of the values updates that part, so the state must be divided too");
  if (!spec.whole() && values.dim != kept.dim) fault("both must be divided along the same dim");
  if (spec.whole()) {
    if (!reader.all(kept.axes)) fault("state of whole parameters must be divided over all axes of the mesh, or be whole");
    return rule(zero1(), one_axis);
  }
  if (!std::includes(kept.axes.begin(), kept.axes.end(), values.axes.begin(), values.axes.end()))
    fault("the state must be divided over the axes of the values, or more");
  if (reader.all(values.axes)) return rule(zero3(), one_axis);
  if (values.axes.size() > 1) fault("values can be divided over one axis or over all");
  const std::string& axis = *values.axes.begin();
  const std::string rest = reader.rest(axis);
  const bool both = reader.all(kept.axes);
  if (!both && kept.axes != values.axes) fault("the state must be divided over the axes of the values, or over all");
  return rule(hybrid(axis, rest, both), mesh);
}

AnnotationTable::AnnotationTable(std::string what, Annotations annotations)
    : what_(std::move(what)), annotations_(std::move(annotations)), used_(annotations_.size(), false) {}

std::optional<PartitionSpec> AnnotationTable::find(const std::string& parameter) {
  const Annotation* found = nullptr;
  for (size_t i = 0; i < annotations_.size(); ++i) {
    const auto& annotation = annotations_[i];
    if (!matches(annotation.pattern, parameter)) continue;
    used_[i] = true;
    if (found != nullptr && !(found->spec == annotation.spec))
      throw ConfigError(text("two annotations of the ", what_, " of '", parameter, "' disagree: '", found->pattern,
                             "' says ", name_of(found->spec), ", '", annotation.pattern, "' says ", name_of(annotation.spec),
                             "; narrow one of the patterns"));
    found = &annotation;
  }
  return found == nullptr ? std::nullopt : std::optional(found->spec);
}

void AnnotationTable::refuse_unused() const {
  for (size_t i = 0; i < annotations_.size(); ++i)
    if (!used_[i])
      throw ConfigError(text("the annotation '", annotations_[i].pattern, "' (", name_of(annotations_[i].spec), ") of the ",
                             what_, " matches no parameter of this model"));
}

}  // namespace tessera
