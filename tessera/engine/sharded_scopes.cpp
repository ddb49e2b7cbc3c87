// The part of Sharded that gathers, edits, prefetches and releases units by name.
#include <exception>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/fully_shard.h"

namespace tessera {
namespace {

std::vector<uint32_t> units_matching(const Engine& engine, const std::string& pattern) {
  std::vector<uint32_t> found;
  std::string names;
  for (uint32_t u = 0; u < engine.units().size(); ++u) {
    const Unit& unit = *engine.units()[u];
    if (unit.is_meant_by(pattern)) found.push_back(u);
    names += text(names.empty() ? "" : ", ", unit.name());
  }
  if (found.empty())
    throw ConfigError(text("the pattern '", pattern, "' matches no unit of this model; its units: ", names));
  return found;
}

}  // namespace

Sharded::Gathered::Gathered(Engine& engine, std::vector<uint32_t> units)
    : engine_(&engine), units_(std::move(units)), exceptions_(std::uncaught_exceptions()) {
  engine_->hold(units_);
  for (const uint32_t u : units_)
    hashes_.push_back(engine_->units()[u]->edited() ? std::vector<uint64_t>{} : engine_->units()[u]->hashes());
}

Sharded::Gathered::~Gathered() noexcept(false) {
  std::string written;
  for (size_t i = 0; i < units_.size() && std::uncaught_exceptions() == exceptions_; ++i) {
    const Unit& unit = *engine_->units()[units_[i]];
    if (unit.edited()) continue;  // by operators, which is kept
    const auto now = unit.hashes();
    for (ParameterIndex p = 0; p < now.size() && written.empty(); ++p)
      if (now[p] != hashes_[i][p]) written = text("parameter '", unit.parameters()[p].name, "' (unit '", unit.name(), "')");
  }
  engine_->let_go(units_);
  if (!written.empty())
    throw GuardError(
        text(written,
             " was written to through its address inside gathered(), past libtorch's operators: other "
             "ranks may have seen it, and this rank's master parameters have not. Write inside edit() instead"));
}

Sharded::Gathered Sharded::gathered(const std::string& units) const { return {*engine_, units_matching(*engine_, units)}; }

void Sharded::edit(const std::string& units, const std::function<void()>& body) {
  engine_->edit(units_matching(*engine_, units), body);
}

bool Sharded::prefetch(const std::string& units) { return engine_->prefetch(units_matching(*engine_, units)); }

void Sharded::release(const std::string& units) { engine_->release_units(units_matching(*engine_, units)); }

}  // namespace tessera
