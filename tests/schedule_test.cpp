#include "tessera/engine/schedule.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera {
namespace {

constexpr ScheduleStep gather(uint32_t unit, Phase phase = Phase::forward) { return {StepKind::gather, phase, unit}; }
constexpr ScheduleStep release(uint32_t unit, Phase phase = Phase::forward) { return {StepKind::release, phase, unit}; }
constexpr ScheduleStep reduce(uint32_t unit) { return {StepKind::reduce, Phase::backward, unit}; }

// Notes all of them; returns which of them departed from the record.
std::vector<size_t> departures(Schedule& schedule, const std::vector<ScheduleStep>& steps) {
  std::vector<size_t> departed;
  for (size_t i = 0; i < steps.size(); ++i)
    if (!schedule.note(steps[i])) departed.push_back(i);
  return departed;
}

const std::vector<ScheduleStep> kIteration = {
    gather(0), release(0), gather(1), gather(1, Phase::backward), reduce(1), gather(0, Phase::backward), reduce(0)};
using Departures = std::vector<size_t>;

TEST(Schedule, TheFirstIterationIsRecorded) {
  Schedule schedule;
  EXPECT_FALSE(schedule.complete());
  EXPECT_EQ(departures(schedule, kIteration), Departures{});
  EXPECT_FALSE(schedule.complete());
  EXPECT_TRUE(schedule.end_iteration());
  EXPECT_TRUE(schedule.complete());
  EXPECT_EQ(schedule.steps(), kIteration);
}

TEST(Schedule, AnEqualIterationDoesNotDepart) {
  Schedule schedule;
  for (int iteration = 0; iteration < 3; ++iteration) {
    EXPECT_EQ(departures(schedule, kIteration), Departures{});
    EXPECT_TRUE(schedule.end_iteration());
    EXPECT_EQ(schedule.steps(), kIteration);
  }
}

TEST(Schedule, ADepartureIsSaidOnceAndRecordedAnew) {
  Schedule schedule;
  departures(schedule, kIteration);
  schedule.end_iteration();
  auto other = kIteration;
  other[2] = gather(2);
  other[4] = reduce(2);
  EXPECT_EQ(departures(schedule, other), Departures{2});
  EXPECT_FALSE(schedule.complete());
  EXPECT_EQ(schedule.steps(), other);
  EXPECT_TRUE(schedule.end_iteration());  // said already
  EXPECT_TRUE(schedule.complete());
  EXPECT_EQ(departures(schedule, other), Departures{});
  EXPECT_TRUE(schedule.end_iteration());
}

TEST(Schedule, ThePhaseIsPartOfAStep) {
  Schedule schedule;
  departures(schedule, {gather(0, Phase::forward)});
  schedule.end_iteration();
  EXPECT_EQ(departures(schedule, {gather(0, Phase::backward)}), Departures{0});
}

TEST(Schedule, ALongerIterationDeparts) {
  Schedule schedule;
  departures(schedule, kIteration);
  schedule.end_iteration();
  auto longer = kIteration;
  longer.push_back(gather(3));
  longer.push_back(release(3));
  EXPECT_EQ(departures(schedule, longer), Departures{kIteration.size()});
  EXPECT_TRUE(schedule.end_iteration());
  EXPECT_EQ(schedule.steps(), longer);
}

TEST(Schedule, AShorterIterationDepartsAtItsEnd) {
  Schedule schedule;
  departures(schedule, kIteration);
  schedule.end_iteration();
  const std::vector<ScheduleStep> shorter(kIteration.begin(), kIteration.begin() + 3);
  EXPECT_EQ(departures(schedule, shorter), Departures{});
  EXPECT_FALSE(schedule.end_iteration());
  EXPECT_EQ(schedule.steps(), shorter);
  EXPECT_EQ(departures(schedule, shorter), Departures{});
  EXPECT_TRUE(schedule.end_iteration());
}

TEST(Schedule, AnEmptyIterationAfterARecordedOneDeparts) {
  Schedule schedule;
  departures(schedule, kIteration);
  schedule.end_iteration();
  EXPECT_FALSE(schedule.end_iteration());
  EXPECT_TRUE(schedule.steps().empty());
}

TEST(Schedule, CountsStepsOfAUnit) {
  Schedule schedule;
  departures(schedule, kIteration);
  schedule.end_iteration();
  EXPECT_EQ(schedule.count(StepKind::gather, 0), 2);
  EXPECT_EQ(schedule.count(StepKind::gather, 1), 2);
  EXPECT_EQ(schedule.count(StepKind::release, 0), 1);
  EXPECT_EQ(schedule.count(StepKind::release, 1), 0);
  EXPECT_EQ(schedule.count(StepKind::reduce, 1), 1);
  EXPECT_EQ(schedule.count(StepKind::reduce, 7), 0);
}

TEST(Schedule, PrintsALineAStep) {
  Schedule schedule;
  EXPECT_EQ(schedule.print({}), "");
  departures(schedule, {gather(1), release(1), gather(0, Phase::backward), reduce(0)});
  schedule.end_iteration();
  EXPECT_EQ(schedule.print({"(root)", "layers.0"}),
            "forward   gather   layers.0\n"
            "forward   release  layers.0\n"
            "backward  gather   (root)\n"
            "backward  reduce   (root)\n");
}

TEST(Schedule, EveryKindAndPhaseHasAName) {
  EXPECT_STREQ(name_of(StepKind::gather), "gather");
  EXPECT_STREQ(name_of(StepKind::release), "release");
  EXPECT_STREQ(name_of(StepKind::reduce), "reduce");
  EXPECT_STREQ(name_of(Phase::idle), "idle");
  EXPECT_STREQ(name_of(Phase::forward), "forward");
  EXPECT_STREQ(name_of(Phase::backward), "backward");
  EXPECT_STREQ(name_of(Phase::stepping), "step");
}

TEST(Schedule, AnAbandonedIterationIsNotCompared) {
  Schedule schedule;
  departures(schedule, {gather(1)});
  schedule.abandon_iteration();
  EXPECT_FALSE(schedule.complete());
  departures(schedule, kIteration);
  EXPECT_TRUE(schedule.end_iteration());
  EXPECT_EQ(departures(schedule, {gather(0)}), Departures{});
  schedule.abandon_iteration();
  EXPECT_EQ(departures(schedule, kIteration), Departures{});
  EXPECT_TRUE(schedule.end_iteration());
  EXPECT_EQ(schedule.steps(), kIteration);
}

}  // namespace
}  // namespace tessera
