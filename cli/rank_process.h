#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/descriptor.h"
#include "tessera/base/error.h"

namespace tessera::cli {

/// A program that the system would not run. The message names it and says why.
class ExecError : public SystemError {
 public:
  ExecError(const std::string& program, int error_number);
  /// What a shell returns in that case: 127 if the program doesn't exist, otherwise 126.
  int exit_status() const { return exit_status_; }

 private:
  int exit_status_;
};

/// How a rank ended.
struct RankEnd {
  int exit_code = 0;  ///< meaningless if `signal` is not 0
  int signal = 0;     ///< that killed it, or 0
  bool core_dumped = false;

  bool failed() const { return signal != 0 || exit_code != 0; }
  int status() const { return signal != 0 ? 128 + signal : exit_code; }  ///< as a shell reports it
};

/// How to start a rank.
struct RankStart {
  std::vector<std::string> command;      ///< program (looked up in our PATH) and its arguments
  std::vector<std::string> environment;  ///< "NAME=value"
  bool own_group = true;              ///< leads a process group of its own, so that what it starts can be signalled with it
  bool inherit_input = false;         ///< reads our stdin; otherwise /dev/null
  bool capture = true;                ///< stdout and stderr are pipes that we read; otherwise ours
  std::function<void()> before_exec;  ///< called in the child; async-signal-safe
};

/// One rank as a child process. If the thread that started it ends, however it ends, the kernel kills the rank.
class RankProcess {
 public:
  /// Returns once the program runs. Throws ExecError if it can't be executed, SystemError if there is no process or
  /// descriptor to be had; nothing is left then.
  static RankProcess start(const RankStart& start);

  pid_t pid() const { return pid_; }
  const Descriptor& output() const { return output_; }
  const Descriptor& errors() const { return errors_; }
  Descriptor take_output() { return std::move(output_); }
  Descriptor take_errors() { return std::move(errors_); }

  /// Sends a signal to the rank, and to what it started if it leads its own group. Its number stays reserved until `reap`,
  /// so this never meets a stranger.
  void send(int signal) const;

  /// How it ended, as soon as it has; the process stays a zombie until `reap`.
  const std::optional<RankEnd>& poll_end();
  const std::optional<RankEnd>& end() const { return end_; }

  /// Removes the zombie. Only after `poll_end` has said that it ended.
  void reap();

 private:
  pid_t pid_ = -1;
  bool own_group_ = true;
  Descriptor output_;
  Descriptor errors_;
  std::optional<RankEnd> end_;
};

}  // namespace tessera::cli
