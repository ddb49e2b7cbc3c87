#pragma once

#include <functional>
#include <string>

#include "tessera/engine/fully_shard.h"
#include "tessera/engine/module_tree.h"

namespace tessera {

/// Where each parameter of a model lies.
struct Rules {
  std::function<Rule(const std::string& name, const at::Tensor& parameter)> of;
  std::function<std::string(const Rule& rule)> name;  ///< parameters of other names are in other units
  std::function<void()> check_used;                   ///< throws ConfigError if something was said about no parameter
  std::string words;                                  ///< for messages, and for comparing ranks
};

/// As tree_of. Throws ConfigError if libtorch would run the code in a way in which its parameters can't be gathered.
ModuleTree script_tree_of(const torch::jit::Module& module);

/// What fully_shard and annotate have in common. `options.placements` and `options.layouts` are not looked at; `rules` may
/// throw ConfigError. Collective: where one rank can't, all throw.
Sharded shard_model(const ModuleTree& model, const Mesh& mesh, const ShardOptions& options,
                    const std::function<Rules()>& rules);

}  // namespace tessera
