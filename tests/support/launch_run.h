#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "cli/launch_command.h"
#include "cli/process_sweep.h"
#include "cli/rank_environment.h"
#include "tessera/base/text.h"

namespace tessera::cli {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

inline double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// A launch in a process of its own, as a user would run it. Its output is collected until it ends or its deadline passes.
class Launch {
 public:
  explicit Launch(
      LaunchOptions options, const std::function<void()>& in_child = [] {})
      : options_(std::move(options)) {
    options_.extra_environment.emplace_back("TESSERA_TEST_MARK", mark_);
    int out[2], err[2];
    EXPECT_EQ(::pipe2(out, O_CLOEXEC) | ::pipe2(err, O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(out[0]);
      ::close(err[0]);
      ::dup2(out[1], 1);
      ::dup2(err[1], 2);
      ::close(out[1]);
      ::close(err[1]);
      ::dup2(::open("/dev/null", O_RDONLY), 0);
      in_child();
      run_and_exit();
    }
    out_ = Descriptor(out[0]);
    err_ = Descriptor(err[0]);
    ::close(out[1]);
    ::close(err[1]);
  }

  /// The same under a terminal of its own, whose other end is read as `out`.
  struct OnTerminal {};
  Launch(OnTerminal, LaunchOptions options) : options_(std::move(options)) {
    options_.extra_environment.emplace_back("TESSERA_TEST_MARK", mark_);
    int terminal;
    pid_ = ::forkpty(&terminal, nullptr, nullptr, nullptr);
    if (pid_ == 0) run_and_exit();
    out_ = Descriptor(terminal);
  }

  ~Launch() {
    if (!status_) ::kill(pid_, SIGKILL);
    if (!status_) ::waitpid(pid_, nullptr, 0);
    sweep({}, entry());
  }

  pid_t pid() const { return pid_; }
  std::string entry() const { return "TESSERA_TEST_MARK=" + mark_; }
  const std::string& out() const { return text_[0]; }
  const std::string& err() const { return text_[1]; }
  void stop_reading_output() { out_.close(); }
  void type(std::string_view keys) {
    EXPECT_EQ(::write(out_.get(), keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }

  /// Reads until stdout holds `wanted`.
  bool await(const std::string& wanted) {
    return collect([&] { return out().find(wanted) != std::string::npos; });
  }

  /// The exit status, or 1000 + the signal that killed the launcher; −1 if it runs on for ten seconds.
  int status() {
    if (!collect([&] { return poll_status(); })) return -1;
    collect([&] { return false; }, milliseconds(50));
    return WIFEXITED(*status_) ? WEXITSTATUS(*status_) : 1000 + WTERMSIG(*status_);
  }

  /// Whether nothing of the launch runs any more within `patience`.
  bool nothing_left(milliseconds patience = milliseconds(0)) const {
    const auto deadline = Clock::now() + patience;
    while (!processes_with(entry()).empty()) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return true;
  }

 private:
  [[noreturn]] void run_and_exit() {
    int status = 99;
    try {
      status = launch(options_);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    std::fflush(nullptr);
    ::_exit(status);
  }

  bool poll_status() {
    int status = 0;
    if (!status_ && ::waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
    return status_.has_value();
  }

  bool collect(const std::function<bool()>& done, milliseconds patience = seconds(10)) {
    const auto deadline = Clock::now() + patience;
    while (!done()) {
      if (Clock::now() > deadline) return false;
      pollfd waits[] = {{out_.get(), POLLIN, 0}, {err_.get(), POLLIN, 0}};
      ::poll(waits, 2, 5);
      char bytes[1 << 16];
      for (int i = 0; i < 2; ++i) {
        if ((waits[i].revents & (POLLIN | POLLHUP)) == 0) continue;
        const ssize_t count = ::read(waits[i].fd, bytes, sizeof bytes);
        if (count > 0)
          text_[i].append(bytes, count);
        else
          (i == 0 ? out_ : err_).close();
      }
    }
    return true;
  }

  LaunchOptions options_;
  std::string mark_ = random_id();
  pid_t pid_;
  Descriptor out_, err_;
  std::string text_[2];
  std::optional<int> status_;
};

/// The same script as every rank.
inline LaunchOptions shell(int ranks, const std::string& script) {
  return {.ranks = ranks, .command = {"/bin/sh", "-c", script}};
}

/// A script that does `script` on `rank` and `others` on the other ranks.
inline std::string on_rank(int rank, const std::string& script, const std::string& others) {
  return text("if [ $RANK = ", rank, " ]; then ", script, "; else ", others, "; fi");
}

}  // namespace tessera::cli
