#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/engine.h"

namespace tessera {

/// All parameters, in the order of Sharded::parameters().
std::vector<ParameterPlace> places_of(const Engine& engine);

inline const UnitParameter& parameter_at(const Engine& engine, const ParameterPlace& place) {
  return engine.units()[place.unit]->parameters()[place.parameter];
}

/// Throws ConfigError if no parameter has that full name. A tied parameter is found by each of its names.
ParameterPlace find(const Engine& engine, const std::string& name);

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The same with each tied parameter under its first name, once. Throws ConfigError naming both where two names of one come
/// with different values.
NamedTensors under_first_names(const Engine& engine, const NamedTensors& values);

/// What holds a value for each element of a parameter (master, moment, average, gradient), put together from the ranks'
/// parts: `part` is this rank's, in the order of the shard's elements, of one type on all ranks. Returns a tensor in the
/// shape of the parameter. Collective. O(ranks · part) time, 8 MiB a rank besides the result.
at::Tensor whole_of(Engine& engine, const ParameterPlace& place, const at::Tensor& part);

/// This rank's part of `whole` (the parameter's shape), in the shape of the shard. A copy.
at::Tensor part_of(const Engine& engine, const ParameterPlace& place, const at::Tensor& whole);

}  // namespace tessera
