// Ranks that throw, die, stop or do something else than the others while they train: the others hear which and why, at once.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/tessera.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/stack.h"

namespace tessera::test {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// A sharded stack that is trained in one rank.
class Training {
 public:
  Training(const World& world, const Placements& placements, bool fused = false)
      : rank_(world.rank.value),
        sharded(fully_shard(net, Mesh(world), stack_options(placements))),
        optimizer_(sharded, {.fused_reduction = fused}) {}

  void step(const std::function<void()>& in_forward = {}, const std::function<void()>& in_backward = {}) {
    stack_loss(net, rank_, in_forward, in_backward).backward();
    optimizer_.step();
    optimizer_.zero_grad();
  }
  std::vector<std::string> processes() {
    return sharded.engine().communicator().all_gather("processes", std::to_string(getpid()));
  }

 private:
  int rank_;

 public:
  Stack net;
  Sharded sharded;

 private:
  AdamW optimizer_;
};

struct Case {
  Placements placements;
  bool fused;
};
std::string words_of(const Case& given) { return name_of(given.placements) + (given.fused ? "Fused" : ""); }
void PrintTo(const Case& given, std::ostream* stream) { *stream << words_of(given); }

class FaultsRanks : public testing::TestWithParam<Case> {
 protected:
  static Training start(const World& world) { return Training(world, GetParam().placements, GetParam().fused); }

  // `fault` is what rank 1 of 3 does in its third step. The others must throw a `Wanted` within `seconds`.
  template <class Wanted>
  static std::vector<RankEnd> run(const std::function<void(Training&)>& fault, const std::vector<std::string>& words,
                                  double seconds = 1.0) {
    const auto ends = run_ranks(3, [&](World world) {
      Training training = start(world);
      training.step();
      training.step();
      const auto processes = training.processes();
      if (world.rank.value == 1) return fault(training);
      const auto begin = Clock::now();
      const std::string said = refusal<Wanted>([&] {
        for (int step = 0; step < 3; ++step) training.step();
      });
      EXPECT_LT(since(begin), seconds);
      expect_words(said, {"rank 1", "step"});
      expect_words(said, words);
      if (words[0] == "died") expect_words(said, {"process " + processes[1]});
      if (world.rank.value == 0 && words[0] == "stopped by a signal") {
        usleep(200'000);  // until the other has been told, too
        kill(std::stoi(processes[1]), SIGCONT);
      }
      // A program that does not go on. Of a rank that throws, failed expectations are not looked at.
      throw std::runtime_error(testing::Test::HasFailure() ? "an expectation failed" : "told");
    });
    for (const int rank : {0, 2}) EXPECT_EQ(ends[static_cast<size_t>(rank)].error, "told") << "rank " << rank;
    return ends;
  }
};

TEST_P(FaultsRanks, AnExceptionInForward) {
  const auto ends = run<PeerError>(
      [](Training& training) { training.step([] { throw std::runtime_error("bad sample 17"); }); }, {"rank 1 failed"});
  EXPECT_EQ(ends[1].error, "bad sample 17");
}

TEST_P(FaultsRanks, AnExceptionInBackward) {
  const auto ends = run<PeerError>(
      [](Training& training) { training.step({}, [] { throw std::runtime_error("bad gradient 17"); }); }, {"rank 1 failed"});
  expect_words(ends[1].error, {"bad gradient 17"});
}

TEST_P(FaultsRanks, KilledInForward) {
  const auto ends = run<PeerError>([](Training& training) { training.step([] { raise(SIGKILL); }); }, {"died"});
  EXPECT_EQ(ends[1].signal, SIGKILL);
}

TEST_P(FaultsRanks, KilledInTheMiddleOfBackward) {
  const auto ends = run<PeerError>([](Training& training) { training.step({}, [] { raise(SIGKILL); }); }, {"died"});
  EXPECT_EQ(ends[1].signal, SIGKILL);
}

TEST_P(FaultsRanks, CrashedBetweenBackwardAndStep) {
  const auto ends = run<PeerError>(
      [](Training& training) {
        stack_loss(training.net, 1).backward();
        abort();
      },
      {"died"});
  EXPECT_EQ(ends[1].signal, SIGABRT);
}

TEST_P(FaultsRanks, StoppedLongerThanTheTimeOut) {
  setenv("TESSERA_TIMEOUT_MS", "700", 1);
  const auto ends = run<PeerError>(
      [](Training& training) {
        training.step({}, [] { raise(SIGSTOP); });
        training.step();
      },
      {"stopped by a signal", "700 ms", "TESSERA_TIMEOUT_MS"}, 1.9);
  unsetenv("TESSERA_TIMEOUT_MS");
  EXPECT_EQ(ends[1].exit_code, 3);  // it hears that the others have given up
  expect_words(ends[1].error, {"rank 1 waited", "failed"});
}

TEST_P(FaultsRanks, FewerSteps) {
  const auto ends = run<PeerError>([](Training&) {}, {"has ended its part of the run", "the same number of steps"});
  EXPECT_EQ(ends[1].exit_code, 0);
}

// Rank 0 takes two micro-batches, rank 1 one.
TEST_P(FaultsRanks, FewerBackwardsInAStep) {
  const auto ends = run_ranks(2, [](World world) {
    Training training = start(world);
    training.step();
    training.processes();
    const auto begin = Clock::now();
    const std::string said = refusal<AgreementError>([&] {
      if (world.rank.value == 0) {
        const auto held = training.sharded.accumulating();
        stack_loss(training.net, 0).backward();
      }
      training.step();
    });
    EXPECT_LT(since(begin), 1.0);
    expect_words(said, {"rank 0", "rank 1", "step 2"});
  });
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.error;
}

// In all, each rank has handed its part over; nobody needs a rank that has ended in order to read.
TEST_P(FaultsRanks, ParametersOfRanksThatHaveEndedCanBeRead) {
  on_ranks(3, [](World world) {
    Training training = start(world);
    for (int step = 0; step < 3; ++step) training.step();
    if (world.rank.value != 0) return;
    usleep(200'000);
    const auto whole = training.sharded.full_parameters();
    EXPECT_EQ(whole.size(), 8U);
    for (const auto& [name, value] : whole) EXPECT_TRUE(torch::isfinite(value).all().item<bool>()) << name;
    const torch::NoGradGuard no_grad;
    EXPECT_NO_THROW(stack_loss(training.net, 0));
  });
}

INSTANTIATE_TEST_SUITE_P(Placements, FaultsRanks,
                         testing::Values(Case{ddp(), false}, Case{ddp(), true}, Case{zero1(), false}, Case{zero1(), true},
                                         Case{zero2(), false}, Case{zero2(), true}, Case{zero3(), false},
                                         Case{zero3(), true}),
                         [](const auto& info) { return words_of(info.param); });

// ---- other ways to end
// -----------------------------------------------------------------------------------------------------

// What an outside optimizer wrote last reaches the peers of a rank that ends right after.
TEST(FaultsRanksEnd, TheLastStepOfATorchOptimizerCounts) {
  for (const auto type : {torch::kFloat, torch::kBFloat16})
    on_ranks(2, [&](World world) {
      const auto train = [&](bool stay) {
        Stack net;
        auto options = stack_options(zero3());
        options.precision.working = type;
        auto sharded = fully_shard(net, Mesh(world), options);
        torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
        for (int step = 0; step < 2; ++step) {
          net->forward(torch::full({3, 8}, 0.3).to(type)).pow(2).mean().backward();
          optimizer.step();
          if (step == 0) optimizer.zero_grad();
        }
        if (stay) sharded.engine().communicator().barrier("stay");
        if (!stay && world.rank.value == 1) return std::vector<std::pair<std::string, torch::Tensor>>();
        auto whole = sharded.full_parameters();
        if (stay) sharded.engine().communicator().barrier("read");
        return whole;
      };
      const auto together = train(true), alone = train(false);
      for (size_t i = 0; i < alone.size(); ++i)
        EXPECT_TRUE(torch::equal(alone[i].second, together[i].second)) << alone[i].first << " in " << c10::toString(type);
    });
}

TEST(FaultsRanksEnd, AfterABrokenBackwardTheNextForwardIsRefused) {
  on_ranks(2, [](World world) {
    Training training(world, zero3());
    training.step();
    expect_words(refusal<std::exception>([&] { training.step({}, [] { throw std::runtime_error("bad gradient"); }); }),
                 {"bad gradient"});
    expect_words(refusal<GuardError>([&] { training.step(); }), {"step 2", "exception", "checkpoint"});
  });
}

std::set<std::string> names_in(const char* folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

TEST(FaultsRanksEnd, NoFileAndNoProcessIsLeft) {
  const auto before = names_in("/dev/shm");
  for (const int signal : {0, SIGKILL, SIGABRT})
    run_ranks(3, [&](World world) {
      Training training(world, zero3());
      training.step();
      training.step({}, [&] {
        if (world.rank.value == 1 && signal != 0) raise(signal);
      });
    });
  EXPECT_EQ(names_in("/dev/shm"), before);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

}  // namespace
}  // namespace tessera::test
