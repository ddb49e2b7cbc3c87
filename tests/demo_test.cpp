#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/program.h"

namespace tessera::cli {
namespace {

TEST(Demo, QuickOneLearnsAndLeavesNothing) {
  TESSERA_NEEDS_PROGRAM;
  const TestFolder folder, temporary;
  ProgramRun run({"demo", "--quick", "--data", "data/shakespeare.txt", "--json", folder.file("demo.json")},
                 {"TMPDIR=" + temporary.file("")});
  ASSERT_EQ(run.status(), 0) << run.err();
  EXPECT_TRUE(run.nothing_left());
  EXPECT_TRUE(folder.holds_nothing_but({"demo.json"}));
  EXPECT_TRUE(temporary.holds_nothing_but({}));
  for (const char* part : {"ddp, rank 1", "zero3, formula", "4Ψ/2", "best byte-level bigram model",
                           "largest difference of a loss", "What it writes"})
    EXPECT_NE(run.out().find(part), std::string::npos) << part << '\n' << run.out();
  std::ifstream stream(folder.file("demo.json"));
  const auto results = nlohmann::json::parse(stream);
  const auto& losses = results.at("zero3").at("loss");
  EXPECT_LT(losses.back().get<double>(), losses.front().get<double>() - 1);
  EXPECT_LT(results.at("compare").at("difference").at("loss").get<double>(), 1e-4);
}

TEST(Demo, LeavesNothingWhenInterrupted) {
  TESSERA_NEEDS_PROGRAM;
  const TestFolder temporary;
  ProgramRun run({"demo", "--quick", "--data", "data/shakespeare.txt"}, {"TMPDIR=" + temporary.file("")});
  ASSERT_TRUE(run.await_error("step 1/")) << run.err();
  run.send(SIGINT);
  EXPECT_EQ(run.status(), 130) << run.err();
  EXPECT_TRUE(run.nothing_left());
  EXPECT_TRUE(temporary.holds_nothing_but({}));
}

TEST(Demo, SaysWhereItLookedForTheText) {
  TESSERA_NEEDS_PROGRAM;
  ProgramRun run({"demo", "--quick", "--data", "/no/such/text"});
  EXPECT_EQ(run.status(), 1);
  EXPECT_NE(run.err().find("/no/such/text"), std::string::npos) << run.err();
}

}  // namespace
}  // namespace tessera::cli
