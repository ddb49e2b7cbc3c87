#pragma once

#include <signal.h>
#include <sys/signalfd.h>

#include <optional>

#include "tessera/base/descriptor.h"

namespace tessera::cli {

/// While it lives, the signals that a launcher acts on (SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD) wait at
/// `descriptor()` instead of interrupting, and SIGPIPE is ignored. Afterwards everything is as it was.
/// What the caller had set to be ignored stays ignored (SIGHUP under nohup; SIGINT from the terminal in a background job),
/// except a SIGINT sent on purpose. For one thread, the only one that creates processes.
class SignalScope {
 public:
  /// Throws SystemError if the kernel refuses.
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

  int descriptor() const { return descriptor_.get(); }

  /// The next signal, if one waits. The sender of the first of several SIGCHLDs is kept, later ones are merged into it.
  std::optional<signalfd_siginfo> next();

  /// Gives a child that is about to execute a program the signals its parent was started with, but lets it receive SIGINT
  /// and SIGTERM even where the parent ignored them. Async-signal-safe.
  void restore_in_child() const;

 private:
  sigset_t old_mask_;
  sigset_t watched_;
  struct sigaction old_pipe_;
  struct sigaction old_child_;
  bool interrupt_ignored_ = false;
  Descriptor descriptor_;
};

}  // namespace tessera::cli
