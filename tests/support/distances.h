#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::test {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// How far apart two runs are: what, and by how much.
using Distances = std::vector<std::pair<std::string, double>>;

inline constexpr double kOtherwise = std::numeric_limits<double>::infinity();  // not the same kind of thing at all

inline double distance(double a, double b) { return std::abs(a - b) / std::max(1.0, std::abs(b)); }

/// Of elements, as a part of the largest in all tensors.
inline void add_distances(Distances& all, const std::string& what, const NamedTensors& some, const NamedTensors& others) {
  const std::map<std::string, torch::Tensor> wanted(others.begin(), others.end());
  if (some.size() != others.size()) all.emplace_back("the number of " + what, kOtherwise);
  double largest = 0.1;  // what gradients consist of, which may nearly cancel
  for (const auto& [name, tensor] : others)
    if (tensor.defined() && tensor.numel() > 0) largest = std::max(largest, tensor.abs().max().item<double>());
  for (const auto& [name, tensor] : some) {
    const auto found = wanted.find(name);
    const bool same_kind = found != wanted.end() && found->second.defined() == tensor.defined() &&
                           (!tensor.defined() || found->second.sizes() == tensor.sizes());
    if (!same_kind || tensor.defined())
      all.emplace_back(
          what + " of " + name,
          same_kind ? (tensor.to(torch::kDouble) - found->second.to(torch::kDouble)).abs().max().item<double>() / largest
                    : kOtherwise);
  }
}

inline void add_distances(Distances& all, const OptimizerState& some, const OptimizerState& others) {
  std::map<std::string, std::pair<NamedTensors, NamedTensors>> by_kind;
  for (const auto& [name, state] : others) {
    const auto found = some.find(name);
    if (found == some.end() || found->second.step != state.step) all.emplace_back("updates of " + name, kOtherwise);
    for (const auto& [kind, tensor] : state.tensors) by_kind[kind].second.emplace_back(name, tensor);
  }
  for (const auto& [name, state] : some)
    for (const auto& [kind, tensor] : state.tensors) by_kind[kind].first.emplace_back(name, tensor);
  for (const auto& [kind, tensors] : by_kind) add_distances(all, kind, tensors.first, tensors.second);
}

}  // namespace tessera::test
