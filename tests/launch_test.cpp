#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tessera/base/error.h"
#include "tests/support/launch_run.h"
#include "tests/support/test_folder.h"

namespace tessera::cli {
namespace {

std::multiset<std::string> lines(const std::string& text) {
  std::multiset<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.insert(line);
  return lines;
}

TEST(Launch, RunsEveryRankAndPrefixesItsLines) {
  Launch run(shell(3, "echo out $RANK of $WORLD_SIZE; echo err $RANK >&2; printf 'no end'"));
  EXPECT_EQ(run.status(), 0);
  EXPECT_EQ(lines(run.out()),
            (std::multiset<std::string>{"[rank 0] out 0 of 3", "[rank 1] out 1 of 3", "[rank 2] out 2 of 3",
                                        "[rank 0] no end", "[rank 1] no end", "[rank 2] no end"}));
  EXPECT_EQ(lines(run.err()), (std::multiset<std::string>{"[rank 0] err 0", "[rank 1] err 1", "[rank 2] err 2"}));
  EXPECT_TRUE(run.nothing_left());
}

TEST(Launch, SetsTheVariablesOfTorchrun) {
  const char* const inherited[] = {"PATH=/bin", "RANK=9", "TORCHELASTIC_USE_AGENT_STORE=True", nullptr};
  const LaunchPlace place{
      .ranks = 3, .run_id = "abc", .port = 1234, .cores = 8, .extra_environment = {{"LOCAL_RANK", "7"}, {"MORE", "a=b"}}};
  const auto got = rank_environment(2, place, inherited);
  const std::set<std::string> have(got.begin(), got.end());
  for (const char* entry :
       {"PATH=/bin", "RANK=2", "WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3", "GROUP_RANK=0", "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=1234", "TORCHELASTIC_RUN_ID=abc", "TORCHELASTIC_USE_AGENT_STORE=False", "TESSERA_RUN_ID=abc",
        "OMP_NUM_THREADS=2", "LOCAL_RANK=7", "MORE=a=b"})
    EXPECT_TRUE(have.contains(entry)) << entry;
  EXPECT_EQ(have.size(), got.size());
}

TEST(Launch, KeepsAThreadCountThatIsSet) {
  const char* const inherited[] = {"OMP_NUM_THREADS=5", nullptr};
  const auto got = rank_environment(0, {.ranks = 2, .cores = 1}, inherited);
  EXPECT_NE(std::find(got.begin(), got.end(), "OMP_NUM_THREADS=5"), got.end());
  const char* const nothing[] = {nullptr};
  const auto at_least_one = rank_environment(0, {.ranks = 2, .cores = 1}, nothing);
  EXPECT_NE(std::find(at_least_one.begin(), at_least_one.end(), "OMP_NUM_THREADS=1"), at_least_one.end());
}

TEST(Launch, GivesEachRunItsOwnName) {
  Launch a(shell(2, "echo $TESSERA_RUN_ID $MASTER_PORT")), b(shell(1, "echo $TESSERA_RUN_ID $MASTER_PORT"));
  EXPECT_EQ(a.status() + b.status(), 0);
  ASSERT_GT(a.out().size(), 9u + 32u);
  EXPECT_EQ(a.out().find(b.out().substr(9, 32)), std::string::npos);
  EXPECT_EQ(a.out().substr(9, a.out().find('\n') - 9), a.out().substr(a.out().find('\n') + 10, a.out().find('\n') - 9))
      << a.out();
}

TEST(Launch, OnlyRankZeroReadsInput) {
  int input[2];
  ASSERT_EQ(::pipe(input), 0);
  ASSERT_EQ(::write(input[1], "hello\n", 6), 6);
  ::close(input[1]);
  Launch run(shell(2, "read line; echo \"got $line\""), [&] { ::dup2(input[0], 0); });
  ::close(input[0]);
  EXPECT_EQ(run.status(), 0);
  EXPECT_EQ(lines(run.out()), (std::multiset<std::string>{"[rank 0] got hello", "[rank 1] got "}));
}

TEST(Launch, EndsTheOthersWithinASecondWhenOneFails) {
  const auto start = Clock::now();
  Launch run(shell(4, on_rank(2, "sleep 0.3; echo lost >&2; exit 7", "trap '' TERM; sleep 1000 & wait; sleep 1000")));
  EXPECT_EQ(run.status(), 7);
  EXPECT_TRUE(run.nothing_left());
  EXPECT_LT(since(start), 0.3 + 3);  // a second, and what it takes to start on a busy machine
  EXPECT_NE(run.err().find("rank 2 of 4"), std::string::npos) << run.err();
  EXPECT_NE(run.err().find("exit code 7"), std::string::npos) << run.err();
  EXPECT_NE(run.err().find("Its last lines:\n  lost\n"), std::string::npos) << run.err();
  EXPECT_NE(run.err().find("Rank 0, 1, 3 did not end when asked to"), std::string::npos) << run.err();
}

TEST(Launch, NamesTheSignalThatKilledARank) {
  Launch run(shell(2, on_rank(1, "kill -SEGV $$", "sleep 1000")));
  EXPECT_EQ(run.status(), 128 + SIGSEGV);
  EXPECT_NE(run.err().find("rank 1 of 2"), std::string::npos) << run.err();
  EXPECT_NE(run.err().find("was killed by SIGSEGV"), std::string::npos) << run.err();
  EXPECT_TRUE(run.nothing_left());
}

TEST(Launch, BlamesTheRankThatFailedFirst) {
  // Rank 0 sees its peer die and fails at once, as ours do.
  const test::TestFolder folder;
  const std::string file = folder.file("pid");
  Launch run(shell(2, on_rank(1, text("echo $$ >", file, "; sleep 0.2; kill -KILL $$"),
                              text("until [ -s ", file, " ]; do sleep 0.01; done; while [ -e /proc/$(cat ", file,
                                   ")/exe ]; do :; done; exit 3"))));
  EXPECT_EQ(run.status(), 128 + SIGKILL) << run.err();
  EXPECT_NE(run.err().find("rank 1 of 2"), std::string::npos) << run.err();
}

TEST(Launch, EndsWhatRanksLeaveBehind) {
  Launch run(shell(2, "sleep 1000 & setsid sleep 1000 & exit 0"));
  EXPECT_EQ(run.status(), 0);
  EXPECT_TRUE(run.nothing_left());
}

TEST(Launch, SaysWhenTheProgramCantRun) {
  Launch missing({.ranks = 3, .command = {"no-such-program"}});
  EXPECT_EQ(missing.status(), 127);
  EXPECT_NE(missing.err().find("can't run 'no-such-program': No such file or directory in any directory of PATH"),
            std::string::npos)
      << missing.err();
  Launch folder({.ranks = 3, .command = {"/tmp"}});
  EXPECT_EQ(folder.status(), 126);
  EXPECT_NE(folder.err().find("can't run '/tmp': Permission denied"), std::string::npos) << folder.err();
}

TEST(Launch, RefusesWhatCantBeMeant) {
  EXPECT_THROW(run_ranks(shell(0, "true")), ConfigError);
  EXPECT_THROW(run_ranks(shell(-1, "true")), ConfigError);
  EXPECT_THROW(run_ranks(shell(1'000'000, "true")), ConfigError);
  EXPECT_THROW(run_ranks({.ranks = 1}), ConfigError);
  EXPECT_THROW(run_ranks({.ranks = 1, .command = {"true"}, .extra_environment = {{"A=B", ""}}}), ConfigError);
}

TEST(Launch, EndsQuietlyWhenNobodyReads) {
  Launch run(shell(2, "trap '' PIPE; while :; do echo line; sleep 0.01; done"));
  ASSERT_TRUE(run.await("[rank 0] line"));
  run.stop_reading_output();
  EXPECT_EQ(run.status(), 141);
  EXPECT_EQ(run.err(), "");
  EXPECT_TRUE(run.nothing_left());
}

TEST(Launch, EndsQuietlyWhenNobodyReadsRankZero) {
  auto options = shell(2, on_rank(0, "while :; do echo line; sleep 0.01; done", "sleep 1000"));
  options.prefix_output = false;
  Launch run(options);
  ASSERT_TRUE(run.await("line"));
  run.stop_reading_output();
  EXPECT_EQ(run.status(), 141);
  EXPECT_EQ(run.err(), "");
  EXPECT_TRUE(run.nothing_left());
}

TEST(Launch, SaysWhenOutputCantBeWritten) {
  Launch run(shell(2, "echo line; sleep 1000"), [] { ::dup2(::open("/dev/full", O_WRONLY), 1); });
  EXPECT_EQ(run.status(), 1);
  EXPECT_NE(run.err().find("output can't be written: No space left on device"), std::string::npos) << run.err();
  EXPECT_TRUE(run.nothing_left());
}

TEST(Launch, SurvivesClosedStreams) {
  Launch run(shell(2, "echo line; echo line >&2"), [] {
    for (int fd = 0; fd < 3; ++fd) ::close(fd);
  });
  EXPECT_EQ(run.status(), 0);
}

TEST(Launch, DeliversEverythingToASlowReader) {
  Launch run(shell(2,
                   "i=0; while [ $i -lt 20000 ]; do echo "
                   "\"0123456789012345678901234567890123456789012345678901234567890123456789$i\"; i=$((i+1)); done"));
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_EQ(run.status(), 0);
  const auto got = lines(run.out());
  EXPECT_EQ(got.size(), 40000u);
  EXPECT_TRUE(got.contains("[rank 1] 012345678901234567890123456789012345678901234567890123456789012345678919999"));
}

TEST(Launch, LetsRankZeroHaveTheTerminal) {
  auto options =
      shell(2, "if [ -t 0 ] && [ -t 1 ] && [ -t 2 ]; then read word; echo $RANK read $word; else echo hidden; fi");
  options.prefix_output = false;
  Launch run(Launch::OnTerminal{}, options);
  run.type("typed\n");
  EXPECT_EQ(run.status(), 0);
  EXPECT_NE(run.out().find("0 read typed"), std::string::npos) << run.out();
  EXPECT_EQ(run.out().find("hidden"), std::string::npos) << run.out();
}

TEST(Launch, KeepsTheLastLinesOfARankThatIsNotShown) {
  auto options = shell(2, on_rank(1, "echo details; echo reason >&2; exit 5", "echo shown; sleep 1000"));
  options.prefix_output = false;
  Launch run(options);
  EXPECT_EQ(run.status(), 5);
  EXPECT_EQ(run.out().find("details"), std::string::npos);
  EXPECT_NE(run.err().find("  reason\n"), std::string::npos) << run.err();
  EXPECT_NE(run.err().find("  details\n"), std::string::npos) << run.err();
}

TEST(Launch, RunsManyRanks) {
  Launch run(shell(64, "echo $LOCAL_RANK"));
  EXPECT_EQ(run.status(), 0);
  EXPECT_EQ(lines(run.out()).size(), 64u);
  EXPECT_TRUE(lines(run.out()).contains("[rank 63] 63"));
}

TEST(LaunchResult, BecomesJson) {
  LaunchResult result{.status = 139, .ranks = 2, .run_id = "abc"};
  result.failure = RankFailure{1, 42, {.signal = SIGSEGV}, {"not \xff UTF-8"}};
  const auto json = to_json(result);
  EXPECT_EQ(json["failure"]["signal"], "SIGSEGV");
  EXPECT_TRUE(json["failure"]["exit_code"].is_null());
  EXPECT_EQ(json["failure"]["last_lines"][0], "not \xef\xbf\xbd UTF-8");
  EXPECT_EQ(json["exit_status"], 139);
  EXPECT_TRUE(json["interrupted_by"].is_null());
  EXPECT_NO_THROW(json.dump());
}

TEST(LaunchResult, SaysNothingOfSuccess) { EXPECT_EQ(explain(LaunchResult{.ranks = 2}), ""); }

}  // namespace
}  // namespace tessera::cli
