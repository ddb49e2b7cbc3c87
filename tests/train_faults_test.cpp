// What `tessera train` does when something goes wrong: a clear message, the right exit status, and nothing left behind.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <iterator>

#include "tests/support/program.h"

namespace tessera::cli {
namespace {

using Arguments = std::vector<std::string>;

// A tiny run; options in `more` come instead of those.
Arguments train(const Arguments& more, const std::string& steps = "4") {
  const Arguments tiny{"--layers", "2",       "--width", "32",        "--heads", "2",       "--hidden",
                       "64",       "--vocab", "256",     "--context", "16",      "--steps", steps};
  Arguments arguments{"train"};
  for (size_t i = 0; i < tiny.size(); i += 2)
    if (std::find(more.begin(), more.end(), tiny[i]) == more.end())
      arguments.insert(arguments.end(), {tiny[i], tiny[i + 1]});
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

void expect_refusal(const Arguments& arguments, const std::vector<std::string>& words, int status) {
  ProgramRun run(arguments);
  EXPECT_EQ(run.status(), status) << run.err();
  for (const auto& word : words)
    EXPECT_NE(run.err().find(word), std::string::npos) << "wanted '" << word << "' in: " << run.err();
  EXPECT_TRUE(run.nothing_left());
}

// The process of `run` that is rank `rank`, once it is there.
pid_t rank_process(const ProgramRun& run, int rank) {
  const std::string wanted = "RANK=" + std::to_string(rank);
  for (int tries = 0; tries < 1000; ++tries) {
    for (const pid_t process : run.processes()) {
      std::ifstream environment("/proc/" + std::to_string(process) + "/environ", std::ios::binary);
      const std::string entries{std::istreambuf_iterator<char>(environment), {}};
      if (entries.find(std::string("\0", 1) + wanted + std::string("\0", 1)) != std::string::npos ||
          entries.starts_with(wanted + std::string("\0", 1)))
        return process;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return -1;
}

// A run on two ranks that has trained some steps already and has many to go.
struct LongRun {
  TestFolder folder;
  ProgramRun run{train({"--ranks", "2", "--run-directory", folder.file("run")}, "1000000"), {"TESSERA_TIMEOUT_MS=1500"}};

  bool trains() {
    for (int tries = 0; tries < 2000; ++tries) {
      std::ifstream log(folder.file("run/log.jsonl"));
      int lines = 0;
      for (std::string line; std::getline(log, line);) ++lines;
      if (lines > 5) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  // Every line of the log is a whole one.
  bool log_is_whole() const {
    std::ifstream log(folder.file("run/log.jsonl"), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(log), {}};
    return !text.empty() && text.back() == '\n';
  }
};

TEST(TrainFaults, MissingData) {
  TESSERA_NEEDS_PROGRAM;
  expect_refusal(train({"--data", "/nowhere/text.txt", "--ranks", "2"}), {"/nowhere/text.txt"}, 1);
}

TEST(TrainFaults, EmptyData) {
  TESSERA_NEEDS_PROGRAM;
  const TestFolder folder;
  const std::ofstream empty(folder.file("empty.txt"));
  expect_refusal(train({"--data", folder.file("empty.txt"), "--ranks", "2"}), {"empty.txt", "empty"}, 1);
}

TEST(TrainFaults, VocabularyLargerThanTheTextSupports) {
  TESSERA_NEEDS_PROGRAM;
  const TestFolder folder;
  std::ofstream text(folder.file("small.txt"));
  for (int i = 0; i < 300; ++i) text << "to be or not to be " << i % 7 << "\n";
  text.close();
  expect_refusal(train({"--data", folder.file("small.txt"), "--ranks", "2", "--vocab", "8000"}), {"8000", "293"}, 2);
}

TEST(TrainFaults, HeadsThatDoNotDivideTheWidth) {
  TESSERA_NEEDS_PROGRAM;
  expect_refusal(train({"--heads", "5", "--ranks", "2"}), {"heads", "5", "32"}, 2);
}

TEST(TrainFaults, NonFiniteLossNamesStepAndUnit) {
  TESSERA_NEEDS_PROGRAM;
  expect_refusal(train({"--ranks", "2", "--lr", "1e38", "--weight-decay", "0"}, "20"), {"not finite", "step ", "unit"}, 1);
}

TEST(TrainFaults, KilledRank) {
  TESSERA_NEEDS_PROGRAM;
  for (const int rank : {0, 1}) {
    LongRun training;
    ASSERT_TRUE(training.trains()) << training.run.err();
    const auto start = std::chrono::steady_clock::now();
    kill(rank_process(training.run, rank), SIGKILL);
    EXPECT_EQ(training.run.status(), 128 + SIGKILL) << training.run.err();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    EXPECT_NE(training.run.err().find("rank " + std::to_string(rank)), std::string::npos) << training.run.err();
    EXPECT_TRUE(training.run.nothing_left());
    EXPECT_TRUE(training.log_is_whole());
  }
}

TEST(TrainFaults, RankStoppedLongerThanTheTimeOut) {
  TESSERA_NEEDS_PROGRAM;
  LongRun training;
  ASSERT_TRUE(training.trains()) << training.run.err();
  kill(rank_process(training.run, 1), SIGSTOP);
  EXPECT_EQ(training.run.status(), 1) << training.run.err();
  EXPECT_NE(training.run.err().find("rank 1"), std::string::npos) << training.run.err();
  EXPECT_NE(training.run.err().find("stopped"), std::string::npos) << training.run.err();
  EXPECT_TRUE(training.run.nothing_left());
}

TEST(TrainFaults, CtrlC) {
  TESSERA_NEEDS_PROGRAM;
  LongRun training;
  ASSERT_TRUE(training.trains()) << training.run.err();
  training.run.send(SIGINT);
  EXPECT_EQ(training.run.status(), 128 + SIGINT) << training.run.err();
  EXPECT_TRUE(training.run.nothing_left());
  EXPECT_TRUE(training.log_is_whole());
}

TEST(TrainFaults, FullDiskForTheLog) {
  TESSERA_NEEDS_PROGRAM;
  const TestFolder folder;
  std::filesystem::create_directory(folder.file("run"));
  std::filesystem::create_symlink("/dev/full", folder.file("run/log.jsonl"));
  expect_refusal(train({"--ranks", "2", "--run-directory", folder.file("run")}), {"log.jsonl", "No space left"}, 1);
}

TEST(TrainFaults, MoreMemoryThanThereIs) {
  TESSERA_NEEDS_PROGRAM;
  // Refused before any rank is started, with both numbers.
  expect_refusal({"train", "--layers", "64", "--width", "16384", "--heads", "64", "--hidden", "65536", "--vocab", "120000",
                  "--ranks", "6", "--placement", "ddp"},
                 {"bytes of memory on this host", "available"}, 1);
}

}  // namespace
}  // namespace tessera::cli
