#include "tessera/engine/annotate.h"

#include <map>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/deferred.h"
#include "tessera/engine/shard_model.h"

namespace tessera {
namespace {

struct Specs {
  std::string name;  // under which the parameter was met first
  PartitionSpec values, state;
};

std::string words_of(const char* what, const Annotations& annotations) {
  std::string words;
  for (const auto& [pattern, spec] : annotations)
    words += text(words.empty() ? "" : ", ", "'", pattern, "' ", name_of(spec));
  return text(what, " {", words, "}");
}

using SpecsOf = std::map<const at::TensorImpl*, Specs>;

// Of all parameters, tied ones under each of their names.
SpecsOf specs_of(const ModuleTree& model, const Annotations& parameters, const Annotations& optimizer_state) {
  AnnotationTable values("values", parameters), states("optimizer state", optimizer_state);
  SpecsOf all;
  for (const auto& [name, tensor] : model.parameters) {
    if (!tensor.defined()) continue;
    const PartitionSpec spec = values.find(name).value_or(P());
    const PartitionSpec state = states.find(name).value_or(spec);
    const auto [found, fresh] = all.emplace(tensor.unsafeGetTensorImpl(), Specs{name, spec, state});
    if (!fresh && !(found->second.values == spec && found->second.state == state))
      throw ConfigError(text("the tied parameter '", found->second.name, "' is annotated ", name_of(found->second.values),
                             " (optimizer state ", name_of(found->second.state), "), but as '", name, "' ", name_of(spec),
                             " (optimizer state ", name_of(state), "); annotate both names alike"));
  }
  values.refuse_unused();
  states.refuse_unused();
  return all;
}

void refuse_placed(const ShardOptions& options) {
  if (!(options.placements == ShardOptions{}.placements) || !options.layouts.empty())
    throw ConfigError("annotate: placements and layouts follow from the annotations; leave both unset in the options");
  if (!options.reshard_after_forward.axis.empty() || options.resident_below != 0)
    throw ConfigError(
        "annotate: where parameters lie follows from the annotations; leave resident_below and the axis of "
        "reshard_after_forward unset in the options, and annotate what is to stay whole with P()");
}

Sharded annotated(const ModuleTree& model, const Mesh& mesh, const Annotations& parameters,
                  const Annotations& optimizer_state, const ShardOptions& options) {
  const auto rules = [&] {
    refuse_placed(options);
    const auto specs = std::make_shared<const SpecsOf>(specs_of(model, parameters, optimizer_state));
    return Rules{.of =
                     [specs, mesh](const std::string& name, const at::Tensor& tensor) {
                       const Specs& found = specs->at(tensor.unsafeGetTensorImpl());
                       return rule_of(name, tensor.sizes().vec(), found.values, found.state, mesh);
                     },
                 .name = [](const Rule& rule) { return text(name_of(rule.layout), ":", name_of(rule.placements)); },
                 .check_used = [] {},
                 .words = text(words_of("annotated", parameters), ", ", words_of("optimizer state", optimizer_state))};
  };
  return shard_model(model, mesh, options, rules);
}

}  // namespace

Sharded annotate(torch::nn::Module& module, const Mesh& mesh, const Annotations& parameters,
                 const Annotations& optimizer_state, const ShardOptions& options) {
  const Deferred::Pause pause;
  settle_deferred(module);
  return annotated(tree_of(module), mesh, parameters, optimizer_state, options);
}

Sharded annotate(torch::jit::Module& module, const Mesh& mesh, const Annotations& parameters,
                 const Annotations& optimizer_state, const ShardOptions& options) {
  const Deferred::Pause pause;
  return annotated(script_tree_of(module), mesh, parameters, optimizer_state, options);
}

}  // namespace tessera
