#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "tessera/layout/division.h"
#include "tessera/layout/layout.h"
#include "tessera/layout/placements.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

/// The mesh axes that one dim of a tensor is divided over.
struct DividedOver {
  DividedOver(std::nullopt_t) {}
  DividedOver(const char* axis) : axes{axis} {}
  DividedOver(std::string axis) : axes{std::move(axis)} {}
  DividedOver(std::initializer_list<std::string> several) : axes(several) {}

  std::vector<std::string> axes;

  bool operator==(const DividedOver&) const = default;
};

/// How a tensor is divided over a mesh: an entry a dim, those that are left out undivided. A tensor is whole on the ranks of
/// every axis that no dim names (GSPMD, Xu et al. 2021, section 3; jax.sharding.PartitionSpec). A value.
struct PartitionSpec {
  std::vector<DividedOver> dims;  ///< the last one is divided

  bool whole() const { return dims.empty(); }
  bool operator==(const PartitionSpec&) const = default;
};

/// P() whole everywhere; P("data") the first dim over axis "data"; P(std::nullopt, "data") the second; P({"a", "b"}) the
/// first over both axes.
PartitionSpec P(DividedOver first = std::nullopt, DividedOver second = std::nullopt, DividedOver third = std::nullopt,
                DividedOver fourth = std::nullopt);

/// `P(null, data)`, for messages.
std::string name_of(const PartitionSpec& spec);

/// The spec of what matches `pattern` (fnmatch: `*` any characters, `?` one, `[…]` a set).
struct Annotation {
  std::string pattern;
  PartitionSpec spec;
};
using Annotations = std::vector<Annotation>;

/// Where a parameter and its state lie, in the terms that the collectives follow from.
struct Rule {
  Placements placements;
  Division division;
  LayoutKind layout;
  bool resident = false;  ///< small, so that it stays gathered; in a unit with others of the kind
};

/// What the specs of a parameter and of its optimizer state say: whole parameters and whole state are ddp, whole parameters
/// with divided state zero1, both divided alike zero3; on a mesh of two axes, divided over one of them hybrid, with state
/// over both its variant. Pure. Throws ConfigError, which names `parameter`, if a spec names an axis that the mesh lacks or
/// one twice, divides a dim that the shape lacks or several dims, or if the two together are none of these.
Rule rule_of(const std::string& parameter, const std::vector<int64_t>& shape, const PartitionSpec& spec,
             const PartitionSpec& state, const Mesh& mesh);

/// Finds the specs of parameters among annotations.
class AnnotationTable {
 public:
  /// `what`: "parameter" or "optimizer state", for messages.
  AnnotationTable(std::string what, Annotations annotations);

  /// The spec that all matching annotations agree on, or none if none matches. Throws ConfigError naming two that don't.
  std::optional<PartitionSpec> find(const std::string& parameter);
  /// Throws ConfigError naming the first annotation that `find` never met.
  void refuse_unused() const;

 private:
  std::string what_;
  Annotations annotations_;
  std::vector<bool> used_;
};

}  // namespace tessera
