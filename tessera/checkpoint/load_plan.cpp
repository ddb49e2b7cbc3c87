#include "tessera/checkpoint/load_plan.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/pattern.h"
#include "tessera/base/suggest.h"
#include "tessera/base/text.h"
#include "tessera/engine/parts.h"
#include "tessera/engine/real_pairs.h"

namespace tessera {
namespace {

constexpr size_t kListed = 8;  // faults of one kind in a message

LoadTarget sharded_target(const Engine& engine, const ParameterPlace& place) {
  const Unit& unit = *engine.units()[place.unit];
  const auto& parameter = unit.parameters()[place.parameter];
  return {.names = {parameter.name},
          .place = place,
          .whole = {},
          .buffers = {},
          .complex = unit.complex(),
          .shape = unit.layout().shape(place.parameter),
          .type = unit.working_type(),
          .runs = parameter.updated};
}

LoadTarget whole_target(const std::string& name, const at::Tensor& tensor) {
  LoadTarget target{.names = {name},
                    .place = {},
                    .whole = tensor.detach(),
                    .buffers = {},
                    .complex = tensor.is_complex(),
                    .shape = tensor.sizes().vec(),
                    .type = real_type(tensor.scalar_type()),
                    .runs = {}};
  if (target.complex) target.shape.push_back(2);
  if (tensor.numel() > 0) target.runs = {{0, tensor.numel() * (target.complex ? 2 : 1), 0}};
  return target;
}

std::vector<LoadTarget> targets_of(Engine& engine) {
  std::vector<LoadTarget> targets;
  for (const auto& place : places_of(engine)) targets.push_back(sharded_target(engine, place));
  for (const auto& parameter : engine.ignored()) targets.push_back(whole_target(parameter.name, parameter.tensor));
  for (auto& target : targets)
    if (const auto found = engine.other_names().find(target.names[0]); found != engine.other_names().end())
      target.names.insert(target.names.end(), found->second.begin(), found->second.end());
  if (engine.buffers() == nullptr) return targets;
  std::map<const at::TensorImpl*, size_t> seen;
  const auto& buffers = engine.buffers()->named();
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto& [name, buffer] = buffers[i];
    const auto [found, fresh] = seen.emplace(buffer.unsafeGetTensorImpl(), targets.size());
    if (fresh)
      targets.push_back(whole_target(name, buffer));
    else
      targets[found->second].names.push_back(name);
    targets[found->second].buffers.push_back(i);
  }
  return targets;
}

bool holds(c10::ScalarType type, c10::ScalarType given) {
  if (c10::isFloatingType(type) || c10::isFloatingType(given))
    return c10::isFloatingType(type) && c10::isFloatingType(given);
  if (type == given || given == at::kBool) return true;
  if (type == at::kBool) return false;
  const auto size = c10::elementSize(type), other = c10::elementSize(given);
  if (c10::isSignedType(type)) return c10::isSignedType(given) ? size >= other : size > other;
  return !c10::isSignedType(given) && size >= other;
}

// What is wrong with giving `target` the values of `entry`, or "".
std::string fault_of(const LoadTarget& target, const SafetensorsSet& files, const SafetensorsSet::Entry& entry) {
  const FileTensor& tensor = *entry.tensor;
  const std::string there = text("tensor '", tensor.name, "' of ", files.files()[entry.file].path(), " is ",
                                 name_of(tensor.type), " ", words_of_shape(tensor.shape));
  const bool pairs = tensor.type == FileType::c64;
  auto shape = tensor.shape;
  if (pairs) shape.push_back(2);
  const auto wanted = target.complex ? std::vector<int64_t>(target.shape.begin(), target.shape.end() - 1) : target.shape;
  const std::string here = text("'", target.names[0], "' is ", target.complex ? "complex pairs of " : "",
                                c10::toString(target.type), " ", words_of_shape(wanted));
  if (pairs && !target.complex) return text(here, ", but ", there, ", which is complex");
  if (shape != target.shape)
    return text(here, ", but ", there,
                target.complex ? text(" (wanted: that shape of C64, or ", words_of_shape(target.shape), " of reals)") : "");
  if (!holds(target.type, scalar_type_of(tensor.type))) return text(here, ", which can't hold what ", there);
  if (target.whole.defined() && at::has_internal_overlap(target.whole) == at::MemOverlap::Yes)
    return text("'", target.names[0], "' is expanded: its elements share memory; make it contiguous");
  return "";
}

class Faults {
 public:
  void add(const std::string& kind, const std::string& fault) {
    auto& all = faults_[kind];
    if (all.empty()) kinds_.push_back(kind);
    all.push_back(fault);
  }
  std::string words() const {
    std::string words;
    for (const auto& kind : kinds_) {
      const auto& all = faults_.at(kind);
      words += text(words.empty() ? "" : "; ", kind);
      for (size_t i = 0; i < std::min(all.size(), kListed); ++i) words += text(i == 0 ? ": " : "; ", all[i]);
      if (all.size() > kListed) words += text("; and ", all.size() - kListed, " more");
    }
    return words;
  }

 private:
  std::vector<std::string> kinds_;
  std::map<std::string, std::vector<std::string>> faults_;
};

bool is_optional(const std::string& name, const LoadOptions& options) {
  return std::any_of(options.optional.begin(), options.optional.end(),
                     [&](const auto& pattern) { return matches(pattern, name); });
}

std::vector<std::string> required(const std::vector<std::string>& names, const LoadOptions& options) {
  std::vector<std::string> left;
  if (!options.strict) return left;
  std::copy_if(names.begin(), names.end(), std::back_inserter(left),
               [&](const auto& name) { return !is_optional(name, options); });
  return left;
}

// What the files probably call `name`: usually the same behind another prefix.
std::string hint_for(const std::string& name, const std::vector<std::string>& names) {
  for (const auto& other : names)
    if (other.ends_with("." + name) || name.ends_with("." + other)) return text("; did you mean '", other, "'?");
  return did_you_mean(name, names);
}

// A pattern that says nothing is likely misspelt.
void check_optional(const std::vector<LoadTarget>& targets, const SafetensorsSet& files, const LoadOptions& options) {
  for (const auto& pattern : options.optional) {
    bool found = false;
    for (const auto& target : targets)
      for (const auto& name : target.names) found |= matches(pattern, name);
    for (const auto& entry : files.tensors()) found |= matches(pattern, entry.tensor->name);
    if (!found)
      throw ConfigError(text("the pattern '", pattern,
                             "' of LoadOptions::optional matches no name of the model and none in ", files.path()));
  }
}

}  // namespace

c10::ScalarType scalar_type_of(FileType type) {
  switch (type) {
    case FileType::boolean:
      return at::kBool;
    case FileType::u8:
      return at::kByte;
    case FileType::i8:
      return at::kChar;
    case FileType::f8_e5m2:
      return at::kFloat8_e5m2;
    case FileType::f8_e4m3:
      return at::kFloat8_e4m3fn;
    case FileType::f8_e8m0:
      return at::kFloat8_e8m0fnu;
    case FileType::i16:
      return at::kShort;
    case FileType::u16:
      return at::kUInt16;
    case FileType::f16:
      return at::kHalf;
    case FileType::bf16:
      return at::kBFloat16;
    case FileType::i32:
      return at::kInt;
    case FileType::u32:
      return at::kUInt32;
    case FileType::f32:
    case FileType::c64:
      return at::kFloat;
    case FileType::f64:
      return at::kDouble;
    case FileType::i64:
      return at::kLong;
    case FileType::u64:
      return at::kUInt64;
  }
  return at::ScalarType::Undefined;
}

LoadPlan::LoadPlan(Engine& engine, const SafetensorsSet& files, const LoadOptions& options) {
  Faults faults;
  std::set<std::string> used;
  auto targets = targets_of(engine);
  check_optional(targets, files, options);
  std::map<std::string, std::string> looked_for;  // by the model's name
  for (auto& target : targets) {
    std::set<std::string> names;
    LoadItem item{std::move(target), {}};
    for (const auto& name : item.target.names) {
      const std::string there = options.rename ? options.rename(name) : name;
      const auto* entry = names.insert(there).second ? files.find(there) : nullptr;
      if (name == item.target.names[0]) looked_for[name] = there;
      if (entry == nullptr) continue;
      used.insert(there);
      if (const auto fault = fault_of(item.target, files, *entry); !fault.empty())
        faults.add("of another shape or type", fault);
      else if (!item.entries.empty() && (entry->tensor->type != item.entries[0].tensor->type ||
                                         entry->tensor->shape != item.entries[0].tensor->shape))
        faults.add("tied in the model",
                   text("'", item.entries[0].tensor->name, "' and '", there, "', which are of different types"));
      item.entries.push_back(*entry);
    }
    if (item.entries.empty())
      missing.push_back(item.target.names[0]);
    else
      items.push_back(std::move(item));
  }
  for (const auto& entry : files.tensors())
    if (!used.contains(entry.tensor->name)) unexpected.push_back(entry.tensor->name);

  const auto lacking = required(missing, options);
  for (size_t i = 0; i < lacking.size(); ++i) {
    const auto& there = looked_for[lacking[i]];
    const std::string renamed = there == lacking[i] ? "" : text(" (as '", there, "')");
    faults.add("missing in the files", text("'", lacking[i], "'", renamed, i < kListed ? hint_for(there, unexpected) : ""));
  }
  for (const auto& name : required(unexpected, options)) faults.add("not in the model", text("'", name, "'"));
  if (const auto words = faults.words(); !words.empty())
    throw ConfigError(text("the tensors of ", files.path(), " are not the model's: ", words,
                           lacking.empty() && unexpected.empty() ? "" : "; see rename, optional and strict of LoadOptions"));
}

std::vector<ParameterPlace> LoadPlan::places() const {
  std::vector<ParameterPlace> all;
  for (const auto& item : items)
    if (item.target.place) all.push_back(*item.target.place);
  return all;
}

}  // namespace tessera
