#include "cli/rank_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

struct Pipe {
  Descriptor read;
  Descriptor write;
};

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw SystemError(text("no pipe for a rank's output: ", std::strerror(errno), "; see ulimit -n"));
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const auto& string : strings) result.push_back(const_cast<char*>(string.c_str()));
  result.push_back(nullptr);
  return result;
}

struct Child {
  const RankStart& start;
  char* const* arguments;
  char* const* environment;
  pid_t parent;
  int output, errors, failure;

  /// Runs in the new process: nothing here may allocate or lock.
  [[noreturn]] void become() const {
    if (start.own_group) ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(126);  // it died before the line above could take effect
    if (!start.inherit_input) ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
    if (start.capture) {
      ::dup2(output, STDOUT_FILENO);
      ::dup2(errors, STDERR_FILENO);
    }
    if (start.before_exec) start.before_exec();
    ::execvpe(arguments[0], arguments, environment);
    const int reason = errno;
    [[maybe_unused]] const ssize_t told = ::write(failure, &reason, sizeof reason);
    ::_exit(127);
  }
};

/// The errno with which `exec` failed, or 0 once it has succeeded, which closes the pipe.
int await_exec(const Descriptor& failure) {
  int reason = 0;
  ssize_t count;
  do count = ::read(failure.get(), &reason, sizeof reason);
  while (count < 0 && errno == EINTR);
  return count == sizeof reason ? reason : 0;
}

void make_nonblocking(const Descriptor& descriptor) { ::fcntl(descriptor.get(), F_SETFL, O_NONBLOCK); }

}  // namespace

ExecError::ExecError(const std::string& program, int error_number)
    : SystemError(text("can't run '", program, "': ", std::strerror(error_number),
                       error_number == ENOENT && program.find('/') == std::string::npos ? " in any directory of PATH" : "")),
      exit_status_(error_number == ENOENT ? 127 : 126) {}

RankProcess RankProcess::start(const RankStart& start) {
  RankProcess rank;
  Pipe output, errors, failure = make_pipe();
  if (start.capture) {
    output = make_pipe();
    errors = make_pipe();
    make_nonblocking(output.read);
    make_nonblocking(errors.read);
  }
  const auto arguments = pointers(start.command), environment = pointers(start.environment);
  const Child child{
      start, arguments.data(), environment.data(), ::getpid(), output.write.get(), errors.write.get(), failure.write.get()};
  const pid_t pid = ::fork();
  if (pid == 0) child.become();
  if (pid < 0)
    throw SystemError(
        text("can't start another process: ", std::strerror(errno), "; see ulimit -u and the pids limit of the cgroup"));
  failure.write.close();
  if (const int reason = await_exec(failure.read); reason != 0) {
    ::waitpid(pid, nullptr, 0);
    throw ExecError(start.command.front(), reason);
  }
  rank.pid_ = pid;
  rank.own_group_ = start.own_group;
  rank.output_ = std::move(output.read);
  rank.errors_ = std::move(errors.read);
  return rank;
}

void RankProcess::send(int signal) const { ::kill(own_group_ ? -pid_ : pid_, signal); }

const std::optional<RankEnd>& RankProcess::poll_end() {
  siginfo_t info{};
  if (end_ || ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid != pid_)
    return end_;
  if (info.si_code == CLD_EXITED)
    end_ = RankEnd{info.si_status, 0, false};
  else
    end_ = RankEnd{0, info.si_status, info.si_code == CLD_DUMPED};
  return end_;
}

void RankProcess::reap() { ::waitpid(pid_, nullptr, WNOHANG); }

}  // namespace tessera::cli
