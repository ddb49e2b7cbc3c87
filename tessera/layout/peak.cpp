#include "tessera/layout/peak.h"

#include <algorithm>
#include <utility>

namespace tessera {

PeakBytes predicted_peak(std::span<const PeakBytes> units) {
  PeakBytes peak;
  int64_t before = 0, before_that = 0;
  for (const auto& unit : units) {
    peak.parameters += unit.parameters;
    peak.gradients += unit.gradients;
    peak.optimizer += unit.optimizer;
    if (unit.in_flight == 0) continue;
    peak.in_flight = std::max(peak.in_flight, unit.in_flight + before + before_that);
    before_that = std::exchange(before, unit.in_flight);
  }
  return peak;
}

}  // namespace tessera
