#include "cli/train_report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/readable.h"
#include "cli/state_formula.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

#define EXPECT_HAS(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

TEST(Readable, FormatsForPeople) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(69206784), "69,206,784");
  EXPECT_EQ(grouped(-1234), "-1,234");
  EXPECT_EQ(grouped(-123), "-123");
  EXPECT_EQ(binary_size(12), "12 bytes");
  EXPECT_EQ(binary_size(1024 * 1.5), "1.5 KiB");
  EXPECT_EQ(binary_size(210.0 * 1024 * 1024), "210 MiB");
  EXPECT_EQ(clock_time(7.4), "0:07");
  EXPECT_EQ(clock_time(3723), "1:02:03");
  EXPECT_EQ(clock_time(NAN), "?");
  EXPECT_EQ(table({{"", "Ψ/2"}, {"rank", "1"}}, "> "), ">       Ψ/2\n> rank    1\n");
}

TEST(StateFormula, IsTheOneOfTheDesign) {
  const auto bytes = [](const StateFormula& formula) {
    return std::vector<double>{formula.parameters.bytes(100), formula.gradients.bytes(100), formula.optimizer.bytes(100)};
  };
  EXPECT_EQ(bytes(state_formula("ddp", "fp32", "fp32", 2)), (std::vector<double>{400, 400, 800}));
  EXPECT_EQ(bytes(state_formula("zero1", "bf16", "bf16", 4)), (std::vector<double>{200, 200, 300}));
  EXPECT_EQ(bytes(state_formula("zero2", "bf16", "fp32", 4)), (std::vector<double>{200, 100, 300}));
  EXPECT_EQ(bytes(state_formula("zero3", "fp32", "fp32", 2)), (std::vector<double>{200, 200, 400}));
  EXPECT_EQ(state_formula("zero3", "bf16", "bf16", 3).optimizer.formula(), "12Ψ/3");
  EXPECT_EQ(state_formula("ddp", "fp32", "fp32", 3).parameters.formula(), "4Ψ");
  EXPECT_THROW(state_formula("zero4", "fp32", "fp32", 2), ConfigError);
}

nlohmann::json small_result() {
  const nlohmann::json rank{
      {"bytes",
       {{"parameters", 200}, {"gradients", 200}, {"optimizer", 400}, {"padding", 64}, {"communication_buffers", 4096}}},
      {"peak_rss_bytes", 1 << 20},
      {"peak_pss_bytes", 1 << 19},
      {"moved_bytes_per_step", {{"gather", 1024}, {"reduce", 2048}}},
      {"exposed_ms_per_step", 1.0},
      {"phases_ms",
       {{"forward", 4.0}, {"backward", 5.0}, {"optimizer", 1.0}, {"gather_wait", 0.25}, {"reduce_wait", 0.75}}}};
  return {{"loss", {5.5, 5.25}}, {"step_ms", {10.0, 10.0}},  {"tokens_per_second", 1234.0},
          {"parameters", 100},   {"placement", "zero3"},     {"ranks", 2},
          {"dtype", "fp32"},     {"gradient_dtype", "fp32"}, {"per_rank", {rank, rank}}};
}

TEST(TrainReport, SetsMeasuredBesideTheFormula) {
  auto result = small_result();
  const std::string plain = summary_text(result);
  EXPECT_HAS(plain, "Trained 2 steps of 100 parameters, zero3 fp32, on 2 ranks");
  EXPECT_HAS(plain, "5.5000 at the first step, 5.2500 at the last");
  EXPECT_HAS(plain, "  rank 1          200        200        400  800       64    4,096\n");
  EXPECT_HAS(plain, "  formula         200        200        400  800\n");
  EXPECT_HAS(plain, "1.00 ms a step (10.0 %)");
  EXPECT_EQ(plain.find("unsharded"), std::string::npos);
  EXPECT_EQ(plain.find("bigram"), std::string::npos);
  result["difference"] = {{"loss", 1e-7}, {"parameters", 2e-7}};
  result["validation"] = {{"loss", 2.0}, {"nats_per_byte", 1.5}, {"bigram_nats_per_byte", 2.4}};
  result["sample"] = "To be";
  result["schedule"] = "gather a\n";
  const std::string full = summary_text(result);
  for (const char* part :
       {"loss 1e-07, parameters 2e-07", "1.5000 nats a byte", "2.4000 nats a byte", "\nTo be\n", "\ngather a\n"})
    EXPECT_HAS(full, part);
}

}  // namespace
}  // namespace tessera::cli
