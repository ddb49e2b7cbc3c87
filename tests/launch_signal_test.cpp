#include "tests/support/launch_run.h"

namespace tessera::cli {
namespace {

class LaunchSignal : public ::testing::TestWithParam<int> {};

TEST_P(LaunchSignal, IsPassedOnAndNothingIsLeft) {
  Launch run(
      shell(2, "trap 'echo asked; exit 0' INT TERM HUP; setsid sleep 1000 & echo ready; while :; do sleep 0.05; done"));
  ASSERT_TRUE(run.await("[rank 0] ready") && run.await("[rank 1] ready"));
  ::kill(run.pid(), GetParam());
  EXPECT_EQ(run.status(), 128 + GetParam());
  EXPECT_TRUE(run.await("[rank 0] asked") && run.await("[rank 1] asked")) << run.out();
  EXPECT_TRUE(run.nothing_left());
}

INSTANTIATE_TEST_SUITE_P(Each, LaunchSignal, ::testing::Values(SIGINT, SIGTERM, SIGHUP));

TEST(LaunchSignals, KillsRanksThatDontListen) {
  auto options = shell(2, "trap '' INT; echo ready; sleep 1000; sleep 1000");
  options.interrupt_grace = milliseconds(300);
  Launch run(options);
  ASSERT_TRUE(run.await("[rank 0] ready") && run.await("[rank 1] ready"));
  const auto asked = Clock::now();
  ::kill(run.pid(), SIGINT);
  EXPECT_EQ(run.status(), 130);
  EXPECT_LT(since(asked), 2);
  EXPECT_TRUE(run.nothing_left());
}

TEST(LaunchSignals, KillsAtOnceWhenAskedAgain) {
  auto options = shell(2, "trap '' INT; echo ready; sleep 1000; sleep 1000");
  options.interrupt_grace = seconds(1000);
  Launch run(options);
  ASSERT_TRUE(run.await("[rank 0] ready") && run.await("[rank 1] ready"));
  ::kill(run.pid(), SIGINT);
  std::this_thread::sleep_for(milliseconds(400));
  ::kill(run.pid(), SIGINT);
  EXPECT_EQ(run.status(), 130);
  EXPECT_TRUE(run.nothing_left());
}

TEST(LaunchSignals, ListensToASignalThatABackgroundJobIgnores) {
  Launch run(shell(1, "echo ready; exec sleep 1000"), [] { ::signal(SIGINT, SIG_IGN); });
  ASSERT_TRUE(run.await("ready"));
  ::kill(run.pid(), SIGINT);
  EXPECT_EQ(run.status(), 130);
  EXPECT_TRUE(run.nothing_left());
}

TEST(LaunchSignals, OutlivesAHangUpUnderNohup) {
  Launch run(shell(1, "echo ready; sleep 0.3; echo still here"), [] { ::signal(SIGHUP, SIG_IGN); });
  ASSERT_TRUE(run.await("ready"));
  ::kill(run.pid(), SIGHUP);
  EXPECT_EQ(run.status(), 0);
  EXPECT_NE(run.out().find("still here"), std::string::npos);
}

TEST(LaunchSignals, PassesUserSignalsOn) {
  Launch run(shell(2, "trap 'echo usr; exit 0' USR1; echo ready; while :; do sleep 0.02; done"));
  ASSERT_TRUE(run.await("[rank 0] ready") && run.await("[rank 1] ready"));
  ::kill(run.pid(), SIGUSR1);
  EXPECT_EQ(run.status(), 0);
  EXPECT_NE(run.out().find("[rank 1] usr"), std::string::npos);
}

TEST(LaunchSignals, LeavesNothingWhenKilled) {
  Launch run(shell(2, "sleep 1000 & setsid sleep 1000 & echo ready; wait"));
  ASSERT_TRUE(run.await("[rank 0] ready") && run.await("[rank 1] ready"));
  ::kill(run.pid(), SIGKILL);
  EXPECT_EQ(run.status(), 1000 + SIGKILL);
  EXPECT_TRUE(run.nothing_left(seconds(2)));
}

TEST(LaunchSignals, HearsCtrlCWhileItsReaderStalls) {
  Launch run(shell(2, "while :; do echo 0123456789012345678901234567890123456789; done"));
  std::this_thread::sleep_for(milliseconds(500));  // nobody reads: every buffer on the way is full
  ::kill(run.pid(), SIGINT);
  const auto deadline = Clock::now() + seconds(5);
  while (!run.nothing_left() && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(run.nothing_left());
  EXPECT_EQ(run.status(), 130);
}

TEST(LaunchSignals, ObeysCtrlCOfATerminal) {
  for (const bool prefix : {true, false}) {
    auto options = shell(3, "trap 'exit 0' INT; sleep 1000 & echo ready; while :; do sleep 0.05; done");
    options.prefix_output = prefix;
    Launch run(Launch::OnTerminal{}, options);
    ASSERT_TRUE(run.await("ready"));
    std::this_thread::sleep_for(milliseconds(200));
    run.type("\x03");
    EXPECT_EQ(run.status(), 130) << run.out();
    EXPECT_TRUE(run.nothing_left());
  }
}

TEST(LaunchSignals, StopsAndContinuesWithItsRanks) {
  Launch run(shell(2, "i=0; while [ $i -lt 30 ]; do echo tick $i; sleep 0.05; i=$((i+1)); done"));
  ASSERT_TRUE(run.await("[rank 1] tick 3"));
  ::kill(run.pid(), SIGTSTP);
  int status = 0;
  ASSERT_EQ(::waitpid(run.pid(), &status, WUNTRACED), run.pid());
  EXPECT_TRUE(WIFSTOPPED(status));
  ::kill(run.pid(), SIGCONT);
  EXPECT_EQ(run.status(), 0);
  EXPECT_NE(run.out().find("[rank 0] tick 29"), std::string::npos);
}

}  // namespace
}  // namespace tessera::cli
