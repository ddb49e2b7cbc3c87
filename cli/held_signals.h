#pragma once

#include <signal.h>

namespace tessera::cli {

/// While it lives, SIGINT and SIGTERM wait instead of ending this thread's process: what must not stay behind can be removed
/// first. Afterwards they act as before. For a process with one thread, or one where all others hold them too.
class HeldSignals {
 public:
  HeldSignals() {
    sigset_t held;
    ::sigemptyset(&held);
    ::sigaddset(&held, SIGINT);
    ::sigaddset(&held, SIGTERM);
    ::sigprocmask(SIG_BLOCK, &held, &before_);
  }
  ~HeldSignals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace tessera::cli
