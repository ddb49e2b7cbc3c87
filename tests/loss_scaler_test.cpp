// How a loss scale changes from step to step.
#include "tessera/engine/loss_scale.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/support/refusal.h"

namespace tessera::test {
namespace {

TEST(LossScaler, GrowsAfterGoodStepsAndBacksOffAtBadOnes) {
  LossScaler scaler(LossScale{.initial = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 2, .min = 1});
  const auto after = [&](const std::string& steps) {
    for (const char step : steps) step == '+' ? scaler.applied() : scaler.back_off();
    return scaler.scale();
  };
  EXPECT_EQ(after("+"), 8);
  EXPECT_EQ(after("+"), 32);
  EXPECT_EQ(after("-"), 8);
  EXPECT_EQ(after("+-"), 2);
  EXPECT_TRUE(scaler.can_back_off());
  EXPECT_EQ(after("+"), 2);  // the count began anew
  EXPECT_EQ(scaler.state().good_steps, 1);
  EXPECT_EQ(after("-"), 1);  // not 0.5
  EXPECT_FALSE(scaler.can_back_off());
  scaler.set_state({.scale = 1e38, .good_steps = 1});
  EXPECT_EQ(after("+"), 1e38);  // four times that is no fp32
}

TEST(LossScaler, DefaultsAreTorchs) {
  const LossScaler scaler(LossScale::dynamic());
  EXPECT_EQ(scaler.scale(), 65536);
  EXPECT_EQ(name_of(LossScale::dynamic()), "dynamic from 65536 by 2 and 0.5 every 2000 steps, 1 or more");
  EXPECT_EQ(name_of(LossScale::fixed(128)), "fixed 128");
  LossScaler none(std::nullopt), fixed(LossScale::fixed(128));
  EXPECT_FALSE(none.in_use());
  fixed.applied();
  fixed.back_off();
  EXPECT_EQ(fixed.scale(), 128);
  EXPECT_FALSE(fixed.can_back_off());
}

TEST(LossScaler, RefusalsNameTheOption) {
  const auto refused = [](const LossScale& rule) { return refusal<ConfigError>([&] { LossScaler scaler(rule); }); };
  expect_words(refused({.initial = 0}), {"the scale", "more than 0"});
  expect_words(refused({.growth_factor = 0.5}), {"growth_factor", "1 or more", "0.5"});
  expect_words(refused({.backoff_factor = 2}), {"backoff_factor", "(0, 1]"});
  expect_words(refused({.backoff_factor = 1}), {"backoff_factor", "less than 1"});
  expect_words(refused({.growth_interval = 0}), {"growth_interval"});
  expect_words(refused({.initial = 4, .min = 8}), {"min", "8"});
  LossScaler scaler(LossScale::dynamic()), none(std::nullopt);
  expect_words(refusal<ConfigError>([&] { scaler.set_state({.scale = 0.5}); }), {"0.5"});
  expect_words(refusal<ConfigError>([&] { scaler.set_state({.scale = 4, .good_steps = 2000}); }), {"good_steps"});
  expect_words(refusal<ConfigError>([&] { none.set_state({.scale = 2}); }), {"ShardOptions::loss_scale"});
}

}  // namespace
}  // namespace tessera::test
