#pragma once

#include "tessera/engine/fully_shard.h"
#include "tessera/layout/partition_spec.h"

namespace tessera {

/// Shards a model as its parameters are annotated, by name pattern: where each lies follows from its PartitionSpec and that
/// of its optimizer state, and the collectives follow from that (see rule_of). Parameters that no pattern matches are whole;
/// state that none matches is divided as its parameter is.
///
///     auto sharded = tessera::annotate(model, mesh, {{"blocks.*.weight", tessera::P("data")}},
///                                      /*optimizer_state=*/{{"*", tessera::P("data")}}, {.units = …});
///
/// Of `options` all counts but placements and layouts, which must not be set. Collective. Throws as fully_shard does, and
/// ConfigError, which names the parameter, where two patterns or the names of a tied parameter disagree or rule_of refuses;
/// a pattern that matches nothing is one too.
Sharded annotate(torch::nn::Module& module, const Mesh& mesh, const Annotations& parameters,
                 const Annotations& optimizer_state = {}, const ShardOptions& options = {});

template <class Impl>
Sharded annotate(torch::nn::ModuleHolder<Impl>& holder, const Mesh& mesh, const Annotations& parameters,
                 const Annotations& optimizer_state = {}, const ShardOptions& options = {}) {
  return annotate(static_cast<torch::nn::Module&>(*holder), mesh, parameters, optimizer_state, options);
}

Sharded annotate(torch::jit::Module& module, const Mesh& mesh, const Annotations& parameters,
                 const Annotations& optimizer_state = {}, const ShardOptions& options = {});

}  // namespace tessera
