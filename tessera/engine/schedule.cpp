#include "tessera/engine/schedule.h"

#include <algorithm>

namespace tessera {
namespace {

std::string padded(const std::string& word, size_t width) {
  return word + std::string(word.size() < width ? width - word.size() : 1, ' ');
}

}  // namespace

const char* name_of(StepKind kind) {
  switch (kind) {
    case StepKind::gather:
      return "gather";
    case StepKind::release:
      return "release";
    case StepKind::reduce:
      return "reduce";
  }
  return "?";
}

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::idle:
      return "idle";
    case Phase::forward:
      return "forward";
    case Phase::backward:
      return "backward";
    case Phase::stepping:
      return "step";
  }
  return "?";
}

bool Schedule::note(const ScheduleStep& step) {
  if (recording_) {
    steps_.push_back(step);
    return true;
  }
  if (position_ < steps_.size() && steps_[position_] == step) {
    ++position_;
    return true;
  }
  steps_.resize(position_);
  steps_.push_back(step);
  recording_ = true;
  return false;
}

bool Schedule::end_iteration() {
  const bool departed = !recording_ && position_ < steps_.size();
  if (departed) steps_.resize(position_);
  recording_ = false;
  position_ = 0;
  return !departed;
}

void Schedule::abandon_iteration() {
  if (recording_) steps_.clear();
  position_ = 0;
}

int Schedule::count(StepKind kind, uint32_t unit) const {
  return static_cast<int>(
      std::count_if(steps_.begin(), steps_.end(), [&](const auto& step) { return step.kind == kind && step.unit == unit; }));
}

std::string Schedule::print(const std::vector<std::string>& unit_names) const {
  std::string lines;
  for (const auto& step : steps_)
    lines += padded(name_of(step.phase), 10) + padded(name_of(step.kind), 9) + unit_names.at(step.unit) + "\n";
  return lines;
}

}  // namespace tessera
