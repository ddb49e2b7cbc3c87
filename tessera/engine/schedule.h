#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// What the engine does with a unit.
enum class StepKind : uint8_t {
  gather,
  release,
  reduce,  ///< its gradients are handed over; they are summed as soon as the peers' have come too
};
/// Where in the iteration.
enum class Phase : uint8_t { idle, forward, backward, stepping };

const char* name_of(StepKind kind);
const char* name_of(Phase phase);

/// One step of an iteration.
struct ScheduleStep {
  StepKind kind;
  Phase phase;
  uint32_t unit;

  bool operator==(const ScheduleStep&) const = default;
};

/// The order of one iteration's steps: recorded in the first, then compared with each further one. Pure; prints.
class Schedule {
 public:
  /// Notes the next step. Returns false the first time that an iteration departs from the recorded one; from then on the
  /// present iteration is recorded anew.
  bool note(const ScheduleStep& step);

  /// An iteration ends: what was recorded in it is what the next one is compared with. Returns false if this iteration ended
  /// earlier than the recorded one (which counts as departing from it).
  bool end_iteration();

  /// An iteration ends that is not to be compared or remembered.
  void abandon_iteration();

  bool complete() const { return !recording_; }
  const std::vector<ScheduleStep>& steps() const { return steps_; }

  /// Steps of `kind` for `unit` in the recorded iteration.
  int count(StepKind kind, uint32_t unit) const;

  /// One line a step: "forward  gather   blocks.0".
  std::string print(const std::vector<std::string>& unit_names) const;

 private:
  std::vector<ScheduleStep> steps_;
  size_t position_ = 0;
  bool recording_ = true;
};

}  // namespace tessera
