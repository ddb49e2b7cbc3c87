#include "cli/process_sweep.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

bool has_entry(pid_t pid, const std::string& entry) {
  std::ifstream file(text("/proc/", pid, "/environ"), std::ios::binary);
  std::string all(1, '\0');
  all.append(std::istreambuf_iterator<char>(file), {});
  return all.find(std::string(1, '\0') + entry + '\0') != std::string::npos;
}

/// Kills `pid` if it is still the process that has `entry`: a descriptor, unlike a number, is never given to a stranger.
void kill_if(pid_t pid, const std::string& entry) {
  const Descriptor process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!has_entry(pid, entry)) return;
  if (process.open())
    ::syscall(SYS_pidfd_send_signal, process.get(), SIGKILL, nullptr, 0);
  else if (errno == ENOSYS)
    ::kill(pid, SIGKILL);
}

/// Keeps none of the launcher's descriptors: a reader of its output would wait for us to close it.
int keep_only(int descriptor) {
  ::dup2(descriptor, 0);
  if (::syscall(SYS_close_range, 1u, ~0u, 0u) != 0)
    for (long other = 1, last = ::sysconf(_SC_OPEN_MAX); other < last; ++other) ::close(static_cast<int>(other));
  return 0;
}

[[noreturn]] void watch(int descriptor, const std::vector<pid_t>& groups, const std::string& entry) {
  ::setsid();  // a kill of the launcher's whole group must not reach us
  sigset_t all;
  sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  ::prctl(PR_SET_NAME, "tessera-watch");
  descriptor = keep_only(descriptor);
  char byte;
  while (::read(descriptor, &byte, 1) < 0 && errno == EINTR) {
  }
  sweep(groups, entry);
  ::_exit(0);
}

}  // namespace

std::vector<pid_t> processes_with(const std::string& entry) {
  std::vector<pid_t> found;
  std::error_code gone;
  for (std::filesystem::directory_iterator at("/proc", gone), end; at != end; at.increment(gone)) {
    const std::string name = at->path().filename();
    pid_t pid = 0;
    const auto [rest, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (error != std::errc() || rest != name.data() + name.size() || pid == ::getpid()) continue;
    if (has_entry(pid, entry)) found.push_back(pid);
  }
  return found;
}

void sweep(const std::vector<pid_t>& groups, const std::string& entry) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (const pid_t group : groups) ::kill(-group, SIGKILL);
  for (auto left = processes_with(entry); !left.empty(); left = processes_with(entry)) {
    for (const pid_t pid : left) kill_if(pid, entry);
    if (std::chrono::steady_clock::now() > deadline) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

Watchdog::Watchdog(const std::vector<pid_t>& groups, const std::string& entry) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw SystemError(text("no pipe for the watchdog: ", std::strerror(errno), "; see ulimit -n"));
  const Descriptor ours(ends[0]);
  alive_ = Descriptor(ends[1]);
  pid_ = ::fork();
  if (pid_ == 0) watch(ours.get(), groups, entry);
  if (pid_ < 0) throw SystemError(text("can't start another process: ", std::strerror(errno), "; see ulimit -u"));
}

Watchdog::~Watchdog() {
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

}  // namespace tessera::cli
