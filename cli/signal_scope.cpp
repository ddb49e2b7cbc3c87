#include "cli/signal_scope.h"

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

bool ignored(int signal) {
  struct sigaction action;
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

void set_action(int signal, void (*handler)(int), int flags, struct sigaction* old) {
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_handler = handler;
  action.sa_flags = flags;
  ::sigaction(signal, &action, old);
}

}  // namespace

SignalScope::SignalScope() : interrupt_ignored_(ignored(SIGINT)) {
  sigemptyset(&watched_);
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGUSR1, SIGUSR2}) sigaddset(&watched_, signal);
  for (const int signal : {SIGHUP, SIGTSTP})
    if (!ignored(signal)) sigaddset(&watched_, signal);
  descriptor_ = Descriptor(::signalfd(-1, &watched_, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!descriptor_.open()) throw SystemError(text("the system refuses a signal descriptor: ", std::strerror(errno)));
  ::sigprocmask(SIG_BLOCK, &watched_, &old_mask_);
  // Under an inherited SIG_IGN for SIGCHLD the kernel would reap children itself, and their exit status would be lost.
  set_action(SIGCHLD, SIG_DFL, SA_NOCLDSTOP, &old_child_);
  set_action(SIGPIPE, SIG_IGN, 0, &old_pipe_);
}

SignalScope::~SignalScope() {
  ::sigaction(SIGPIPE, &old_pipe_, nullptr);
  ::sigaction(SIGCHLD, &old_child_, nullptr);
  ::sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
}

std::optional<signalfd_siginfo> SignalScope::next() {
  signalfd_siginfo info;
  while (::read(descriptor_.get(), &info, sizeof info) == sizeof info) {
    const bool from_terminal = info.ssi_code == SI_KERNEL;
    if (info.ssi_signo == SIGINT && interrupt_ignored_ && from_terminal) continue;
    return info;
  }
  return std::nullopt;
}

void SignalScope::restore_in_child() const {
  ::sigaction(SIGPIPE, &old_pipe_, nullptr);
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) set_action(signal, SIG_DFL, 0, nullptr);
  sigset_t mask = old_mask_;
  sigdelset(&mask, SIGINT);
  sigdelset(&mask, SIGTERM);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
}

}  // namespace tessera::cli
