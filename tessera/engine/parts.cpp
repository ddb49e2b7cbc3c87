#include "tessera/engine/parts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_complex.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/real_pairs.h"

namespace tessera {
namespace {

constexpr int64_t kBlock = 8 << 20;  // bytes

std::string with_shape(const at::Tensor& tensor) {
  return text(c10::toString(tensor.scalar_type()), " ", c10::str(tensor.sizes()));
}

// The one that parameter `name` is known by here.
const std::string& first_name(const Engine& engine, const std::string& name) {
  for (const auto& [first, others] : engine.other_names())
    if (std::find(others.begin(), others.end(), name) != others.end()) return first;
  return name;
}

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined() || a.is_same(b)) return a.is_same(b);
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && at::equal(a, b);
}

// Whoever else has the same part leaves it to the first.
bool sends(const Division& division, Rank rank) {
  for (int r = 0; r < rank.value; ++r)
    if (division.optimizer_part(Rank(r)) == division.optimizer_part(rank)) return false;
  return true;
}

// Copies bytes [begin, begin + from.size()) of a packed part to where its runs lie in the whole.
void unpack(const std::string& from, int64_t begin, const std::vector<Run>& runs, int64_t element, std::byte* whole) {
  const int64_t end = begin + static_cast<int64_t>(from.size());
  int64_t at = 0;  // of the run in the part
  for (const Run& run : runs) {
    const int64_t size = run.count * element, first = std::max(at, begin), last = std::min(at + size, end);
    if (first < last)
      std::memcpy(whole + run.begin * element + (first - at), from.data() + (first - begin),
                  static_cast<size_t>(last - first));
    at += size;
  }
}

}  // namespace

std::vector<ParameterPlace> places_of(const Engine& engine) {
  std::vector<ParameterPlace> places;
  for (uint32_t u = 0; u < engine.units().size(); ++u)
    for (ParameterIndex p = 0; p < engine.units()[u]->parameters().size(); ++p) places.push_back({u, p});
  return places;
}

ParameterPlace find(const Engine& engine, const std::string& name) {
  const std::string& first = first_name(engine, name);
  for (const auto& place : places_of(engine))
    if (parameter_at(engine, place).name == first) return place;
  throw ConfigError(text("'", name, "' is no parameter of the sharded model; Sharded::named_parameters lists their names"));
}

NamedTensors under_first_names(const Engine& engine, const NamedTensors& values) {
  NamedTensors all;
  std::map<std::string, std::pair<std::string, at::Tensor>> seen;  // by first name: as given
  for (const auto& [name, value] : values) {
    const std::string& first = first_name(engine, name);
    const auto [found, fresh] = seen.try_emplace(first, name, value);
    if (fresh)
      all.emplace_back(first, value);
    else if (const auto& [other, values_of_other] = found->second; other == name)
      throw ConfigError(text("'", name, "' is given twice"));
    else if (!same_values(value, values_of_other))
      throw ConfigError(text("'", other, "' and '", name, "' are one tied parameter, but come with different values"));
  }
  return all;
}

at::Tensor whole_of(Engine& engine, const ParameterPlace& place, const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  Communicator& communicator = engine.communicator();
  const Unit& unit = *engine.units()[place.unit];
  const Division& division = unit.division();
  const auto& parameter = unit.parameters()[place.parameter];
  if (!part.defined() || part.numel() != parameter.shard.numel())
    throw ConfigError(text("this rank's part of parameter '", parameter.name, "' has the shape ",
                           c10::str(parameter.shard.sizes()), ", but what was given is ",
                           part.defined() ? with_shape(part) : std::string("undefined"), " (rank ",
                           communicator.rank().value, ")"));
  const at::Tensor packed = part.detach().contiguous();
  const auto* mine = static_cast<const char*>(packed.const_data_ptr());
  const auto element = static_cast<int64_t>(packed.element_size());
  std::vector<std::vector<Run>> runs;
  int64_t longest = 0;
  for (int r = 0; r < communicator.size(); ++r) {
    runs.push_back(sends(division, Rank(r)) ? division.updated(unit.layout(), place.parameter, Rank(r))
                                            : std::vector<Run>{});
    longest = std::max(longest, count_of(runs.back()) * element);
  }
  at::Tensor whole = at::empty(unit.layout().shape(place.parameter), packed.options());
  auto* to = static_cast<std::byte*>(whole.mutable_data_ptr());
  const int64_t size = count_of(runs[static_cast<size_t>(communicator.rank().value)]) * element;
  for (int64_t begin = 0; begin < longest; begin += kBlock) {
    const int64_t count = std::clamp<int64_t>(size - begin, 0, kBlock);
    const auto blocks =
        communicator.all_gather(text("whole '", parameter.name, "' in ", c10::toString(packed.scalar_type())),
                                std::string(count > 0 ? mine + begin : "", static_cast<size_t>(count)));
    for (size_t r = 0; r < runs.size(); ++r) unpack(blocks[r], begin, runs[r], element, to);
  }
  // There are no complex numbers of other types: their pairs stay pairs.
  const bool complex = unit.complex() && (whole.scalar_type() == at::kFloat || whole.scalar_type() == at::kDouble);
  return complex ? at::view_as_complex(whole) : whole;
}

at::Tensor part_of(const Engine& engine, const ParameterPlace& place, const at::Tensor& whole) {
  const at::NoGradGuard no_grad;
  const Unit& unit = *engine.units()[place.unit];
  const auto& parameter = unit.parameters()[place.parameter];
  const at::Tensor pairs = whole.defined() ? real_pairs(whole) : whole;
  if (!whole.defined() || pairs.sizes() != unit.layout().shape(place.parameter))
    throw ConfigError(text("parameter '", parameter.name, "' has the shape ",
                           c10::str(c10::IntArrayRef(unit.shape(place.parameter))), ", but what was given is ",
                           whole.defined() ? with_shape(whole) : std::string("undefined")));
  const at::Tensor flat = pairs.detach().contiguous().view(-1);
  std::vector<at::Tensor> pieces;
  for (const Run& run : parameter.updated) pieces.push_back(flat.narrow(0, run.begin, run.count));
  if (pieces.empty()) return at::empty(parameter.shard.sizes(), pairs.options());
  return at::cat(pieces).view(parameter.shard.sizes());
}

}  // namespace tessera
