#include "tessera/layout/peak.h"

#include <algorithm>
#include <utility>

namespace tessera {

PeakBytes predicted_peak(std::span<const UnitSizes> units, Rank rank) {
  PeakBytes peak;
  int64_t before = 0, before_that = 0;
  for (const auto& unit : units) {
    const Division& division = unit.division;
    int64_t trained = 0;
    for (ParameterIndex p = 0; p < unit.trainable.size(); ++p) trained += unit.trainable[p] ? unit.layout.numel(p).value : 0;
    const int64_t updated = unit.layout.shard(division.optimizer_part(rank), division.optimizer_parts()).value;
    peak.parameters += unit.layout.shard(division.parameter_part(rank), division.parameter_parts()).value * unit.working;
    peak.optimizer += updated * unit.master;
    if (trained == 0) continue;
    peak.optimizer += updated * unit.moments;
    peak.gradients += unit.shown_copies;
    if (unit.placements.gradient == Placement::replicated) {
      peak.gradients += trained * unit.taken;
      continue;
    }
    peak.gradients += updated * unit.gradient;
    const int64_t mine = trained * unit.taken;
    peak.in_flight = std::max(peak.in_flight, mine + before + before_that);
    before_that = std::exchange(before, mine);
  }
  return peak;
}

}  // namespace tessera
