#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/engine/engine.h"

namespace tessera {

/// What can be loaded: a sharded parameter, or a tensor that is whole on every rank.
struct LoadTarget {
  std::vector<std::string> names;       ///< in the model
  std::optional<ParameterPlace> place;  ///< of a sharded parameter
  at::Tensor whole;                     ///< else
  std::vector<size_t> buffers;          ///< its numbers among the engine's, if it is one
  bool complex = false;
  std::vector<int64_t> shape;  ///< of complex ones as pairs, with one more dim
  c10::ScalarType type;        ///< real
  std::vector<Run> runs;       ///< the elements that this rank wants
};

/// A target, and its tensors in the files: one under each name that they have. All have the same values.
struct LoadItem {
  LoadTarget target;
  std::vector<SafetensorsSet::Entry> entries;
};

/// Which tensor becomes what.
struct LoadPlan {
  std::vector<LoadItem> items;  ///< that the files have
  std::vector<std::string> missing, unexpected;

  /// Throws ConfigError listing what doesn't fit. O(names · log).
  LoadPlan(Engine& engine, const SafetensorsSet& files, const LoadOptions& options);

  std::vector<ParameterPlace> places() const;  ///< of the sharded parameters
};

/// The type of the tensors that a file's bytes are; complex ones are pairs of kFloat.
c10::ScalarType scalar_type_of(FileType type);

}  // namespace tessera
