// The part of Engine that gathers, edits and releases units on the caller's word.
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/engine.h"

namespace tessera {

void Engine::refuse_in_scope(const char* what) const {
  for (const auto& unit : units_)
    if (unit->holders > 0)
      throw GuardError(text(what, " (step ", step_, ") inside a scope that keeps unit '", unit->name(),
                            "' gathered, whose parameters would change under it; end gathered() or edit() first"));
}

void Engine::hold(const std::vector<uint32_t>& units) {
  settle();
  if (phase_ == Phase::backward) throw GuardError("units can't be gathered or edited by hand inside backward");
  for (const uint32_t index : units) {
    Unit& unit = *units_[index];
    if (unit.residency() != Residency::resident) gather(index);
    ++unit.holders;
  }
}

void Engine::let_go(const std::vector<uint32_t>& units) {
  for (const uint32_t index : units) --units_[index]->holders;
  release_units(units);
}

void Engine::edit(const std::vector<uint32_t>& units, const std::function<void()>& body) {
  if (!body) throw ConfigError("edit needs a function that writes to the parameters");
  for (const uint32_t index : units)
    if (units_[index]->holders > 0)
      throw GuardError(
          text("unit '", units_[index]->name(),
               "' can't be edited inside another scope that keeps it gathered; end gathered() or edit() first"));
  settle();
  release_all();  // what operators wrote before is no part of this
  hold(units);
  std::vector<std::vector<uint64_t>> before;
  for (const uint32_t index : units) {
    units_[index]->begin_edit();
    before.push_back(units_[index]->hashes());
  }
  try {
    body();
  } catch (...) {
    for (const uint32_t index : units) units_[index]->drop_edit();
    let_go(units);
    throw;
  }
  // Autograd must know of writes through addresses, too: what was saved for a backward holds other values now.
  for (size_t i = 0; i < units.size(); ++i) {
    const auto after = units_[units[i]]->hashes();
    for (ParameterIndex p = 0; p < after.size(); ++p)
      if (after[p] != before[i][p]) units_[units[i]]->parameters()[p].tensor.unsafeGetTensorImpl()->bump_version();
  }
  let_go(units);
}

bool Engine::prefetch(const std::vector<uint32_t>& units) {
  bool all = true;
  for (const uint32_t index : units) all &= units_[index]->prefetch();
  return all;
}

void Engine::release_units(const std::vector<uint32_t>& units) {
  for (const uint32_t index : units)
    if (units_[index]->holders == 0 && units_[index]->residency() == Residency::resident) release(index);
}

}  // namespace tessera
