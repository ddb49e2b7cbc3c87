// Freezes the names in the JSON of `tessera train`: what is here is what docs/train_json.md promises, and nothing else.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/support/program.h"

namespace tessera::cli {
namespace {

using nlohmann::json;
using Names = std::set<std::string>;

const Names kAlways{"loss",  "step_ms", "tokens_per_second", "parameters", "placement",
                    "ranks", "dtype",   "gradient_dtype",    "per_rank"};

Names names(const json& object) {
  Names names;
  for (const auto& [name, value] : object.items()) names.insert(name);
  return names;
}

Names with(Names names, std::initializer_list<const char*> more) {
  names.insert(more.begin(), more.end());
  return names;
}

/// What two ranks of a tiny model report.
json result_of(std::vector<std::string> more) {
  const TestFolder folder;
  std::vector<std::string> arguments{"train",
                                     "--layers",
                                     "2",
                                     "--width",
                                     "32",
                                     "--heads",
                                     "2",
                                     "--hidden",
                                     "64",
                                     "--vocab",
                                     "256",
                                     "--context",
                                     "16",
                                     "--batch",
                                     "1",
                                     "--steps",
                                     "3",
                                     "--ranks",
                                     "2",
                                     "--threads-per-rank",
                                     "1",
                                     "--json",
                                     folder.file("r.json")};
  arguments.insert(arguments.end(), more.begin(), more.end());
  ProgramRun run(arguments);
  EXPECT_EQ(run.status(), 0) << run.err();
  EXPECT_NE(run.out().find("Trained 3 steps"), std::string::npos) << run.out();
  EXPECT_TRUE(run.nothing_left());
  EXPECT_TRUE(folder.holds_nothing_but({"r.json"}));
  std::ifstream stream(folder.file("r.json"));
  return json::parse(stream);
}

void check_rank(const json& rank) {
  EXPECT_EQ(names(rank), (Names{"bytes", "peak_rss_bytes", "peak_pss_bytes", "base_rss_bytes", "base_pss_bytes",
                                "moved_bytes_per_step", "exposed_ms_per_step", "phases_ms"}));
  EXPECT_EQ(names(rank["bytes"]), (Names{"parameters", "gradients", "optimizer", "padding", "communication_buffers"}));
  EXPECT_EQ(names(rank["moved_bytes_per_step"]), (Names{"gather", "reduce"}));
  EXPECT_EQ(names(rank["phases_ms"]), (Names{"forward", "backward", "optimizer", "gather_wait", "reduce_wait"}));
  for (const auto& [role, bytes] : rank["bytes"].items()) EXPECT_TRUE(bytes.is_number_integer()) << role;
  for (const auto& [phase, ms] : rank["phases_ms"].items()) EXPECT_GE(ms.get<double>(), 0) << phase;
  EXPECT_GT(rank["peak_rss_bytes"].get<int64_t>(), 0);
  EXPECT_GT(rank["peak_pss_bytes"].get<int64_t>(), 0);
}

void check_common(const json& result) {
  EXPECT_EQ(result["loss"].size(), 3u);
  EXPECT_EQ(result["step_ms"].size(), 3u);
  EXPECT_GT(result["tokens_per_second"].get<double>(), 0);
  EXPECT_TRUE(result["parameters"].is_number_integer());
  EXPECT_EQ(result["ranks"], 2);
  ASSERT_EQ(result["per_rank"].size(), 2u);
  for (const auto& rank : result["per_rank"]) check_rank(rank);
}

TEST(TrainJson, NamesOfARandomRunComparedWithTheUnsharded) {
  TESSERA_NEEDS_PROGRAM;
  const json result = result_of({"--data", "random", "--placement", "zero3", "--compare", "unsharded"});
  EXPECT_EQ(names(result), with(kAlways, {"difference"}));
  EXPECT_EQ(names(result["difference"]), (Names{"loss", "parameters"}));
  EXPECT_EQ(result["placement"], "zero3");
  EXPECT_EQ(result["dtype"], "fp32");
  EXPECT_EQ(result["gradient_dtype"], "fp32");
  check_common(result);
  EXPECT_LT(result["difference"]["loss"].get<double>(), 1e-4);
}

TEST(TrainJson, NamesOfARunOnAText) {
  TESSERA_NEEDS_PROGRAM;
  const TestFolder folder;
  std::ofstream text_file(folder.file("text.txt"));
  for (int line = 0; line < 200; ++line) text_file << "line " << line * line << " of a text that is long enough\n";
  text_file.close();
  const json result = result_of({"--data", folder.file("text.txt"), "--placement", "ddp", "--dtype", "bf16", "--sample", "5",
                                 "--schedule", "--validate-every", "2", "--validation-samples", "4"});
  EXPECT_EQ(names(result), with(kAlways, {"validation", "sample", "schedule"}));
  EXPECT_EQ(names(result["validation"]), (Names{"loss", "nats_per_byte", "bigram_nats_per_byte", "during"}));
  ASSERT_EQ(result["validation"]["during"].size(), 1u);
  EXPECT_EQ(names(result["validation"]["during"][0]), (Names{"step", "loss"}));
  EXPECT_TRUE(result["sample"].is_string());
  EXPECT_TRUE(result["schedule"].is_string());
  EXPECT_EQ(result["gradient_dtype"], "bf16");
  check_common(result);
}

TEST(TrainJson, GoesToStandardOutputAlone) {
  TESSERA_NEEDS_PROGRAM;
  ProgramRun run({"train", "--layers", "1", "--width", "16", "--heads", "2", "--hidden", "16", "--vocab", "16", "--context",
                  "8", "--steps", "1", "--json", "-"});
  EXPECT_EQ(run.status(), 0) << run.err();
  EXPECT_EQ(names(json::parse(run.out())), kAlways);
  EXPECT_NE(run.err().find("Trained 1 step"), std::string::npos) << run.err();
}

}  // namespace
}  // namespace tessera::cli
