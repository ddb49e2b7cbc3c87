#include "tests/support/on_ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace tessera::test {
namespace {

struct Child {
  pid_t process = -1;
  int errors = -1;  // read end of a pipe with what() of the exception
  bool running = true;
};

void set(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }

[[noreturn]] void be_rank(int rank, int ranks, const std::string& run, int errors, const std::function<void(World)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  set("RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(ranks));
  set("LOCAL_RANK", std::to_string(rank));
  set("LOCAL_WORLD_SIZE", std::to_string(ranks));
  set("TESSERA_RUN_ID", run);
  int code = 0;
  const bool failed_before = testing::Test::HasFailure();  // in the parent: not this rank's failure
  try {
    body(World::from_env());
  } catch (const std::exception& error) {
    const std::string words = error.what();
    if (write(errors, words.data(), words.size()) < 0) std::perror("write");
    code = 3;
  }
  if (code == 0 && !failed_before && testing::Test::HasFailure()) code = 4;
  std::fflush(nullptr);
  _exit(code);
}

std::string read_all(int fd) {
  std::string words;
  char part[1024];
  for (ssize_t got; (got = read(fd, part, sizeof part)) > 0;) words.append(part, static_cast<size_t>(got));
  return words;
}

}  // namespace

std::vector<RankEnd> run_ranks(int ranks, const std::function<void(World)>& body, std::chrono::milliseconds timeout) {
  static std::atomic<int> runs{0};
  const std::string run = std::to_string(getpid()) + "." + std::to_string(runs++);
  std::fflush(nullptr);
  std::vector<Child> children;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("pipe");
    const pid_t process = fork();
    if (process == 0) be_rank(rank, ranks, run, ends[1], body);
    close(ends[1]);
    children.push_back({process, ends[0]});
  }
  std::vector<RankEnd> results(children.size());
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (size_t running = children.size(); running > 0;) {
    for (size_t rank = 0; rank < children.size(); ++rank) {
      int status = 0;
      if (!children[rank].running || waitpid(children[rank].process, &status, WNOHANG) != children[rank].process) continue;
      children[rank].running = false;
      --running;
      results[rank] = {WIFEXITED(status) ? WEXITSTATUS(status) : 0, WIFSIGNALED(status) ? WTERMSIG(status) : 0,
                       read_all(children[rank].errors)};
      close(children[rank].errors);
    }
    if (std::chrono::steady_clock::now() > deadline)
      for (auto& child : children)
        if (child.running) kill(child.process, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return results;
}

void on_ranks(int ranks, const std::function<void(World)>& body, std::chrono::milliseconds timeout) {
  const auto ends = run_ranks(ranks, body, timeout);
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_EQ(ends[rank].signal, 0) << "rank " << rank << " of " << ranks << " was ended by a signal";
    EXPECT_EQ(ends[rank].exit_code, 0) << "rank " << rank << " of " << ranks << ": " << ends[rank].error;
  }
}

}  // namespace tessera::test
