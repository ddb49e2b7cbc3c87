#include "cli/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>

#include "cli/process_sweep.h"
#include "cli/rank_environment.h"
#include "cli/rank_streams.h"
#include "cli/signal_scope.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kMostRanks = 1024;
constexpr milliseconds kRepeat{250};  // a second signal sooner than this is the first one seen twice (`timeout` signals so)
constexpr milliseconds kSettle{20};   // after the first failure, to see whether it was the cause
constexpr milliseconds kLastOutput{1000};  // for a reader that stalls, after a failure
constexpr milliseconds kUnkillable{5000};  // a process in the kernel's uninterruptible sleep may not even end by SIGKILL

/// Opening a pipe must never give it the number of a standard stream that our caller closed.
void open_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd)
    if (::fcntl(fd, F_GETFD) < 0 && ::open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY) < 0) return;
}

void check(const LaunchOptions& options) {
  if (options.ranks < 1 || options.ranks > kMostRanks)
    throw ConfigError(text("the number of ranks must be from 1 to ", kMostRanks, ", but is ", options.ranks));
  if (options.command.empty() || options.command.front().empty())
    throw ConfigError("there is no program to launch; give one after the options, as in: tessera launch -n 2 -- ./program");
  for (const auto& [name, value] : options.extra_environment)
    if (name.empty() || name.find('=') != std::string::npos || (name + value).find('\0') != std::string::npos)
      throw ConfigError(text("'", name, "' can't be the name of an environment variable"));
  rlimit limit{};
  const rlim_t wanted = static_cast<rlim_t>(options.ranks) * 2 + 32;
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < wanted)
    throw ConfigError(text(options.ranks, " ranks need ", wanted, " open files, but the limit is ", limit.rlim_cur,
                           "; raise it with: ulimit -n ", wanted));
}

/// A launch from its first process to its last byte.
class Supervisor {
 public:
  explicit Supervisor(const LaunchOptions& options) : options_(options), streams_(options.ranks, options.prefix_output) {}

  LaunchResult run() {
    result_.ranks = options_.ranks;
    result_.run_id = random_id();
    try {
      start();
      const Watchdog watchdog(groups(), marker());
      while (stage_ != Stage::Done) turn();
    } catch (const ExecError& error) {
      abandon();
      result_.problem = error.what();
      result_.status = error.exit_status();
    } catch (...) {
      abandon();
      throw;
    }
    for (auto& rank : ranks_) rank.reap();
    if (result_.failure) result_.failure->last_lines = streams_.last_lines(result_.failure->rank);
    result_.seconds = std::chrono::duration<double>(Clock::now() - started_).count();
    while (result_.interrupted_by != 0 && signals_.next()) {
    }  // the same request again, which would otherwise kill our caller now that all is done
    return std::move(result_);
  }

 private:
  /// All ranks run; one has just failed; they were asked to end; they were killed; none is left, and their last output is on
  /// its way; that too is out.
  enum class Stage { Running, Settling, Ending, Killing, Emptying, Done };

  void start();
  void abandon();
  std::string marker() const { return "TESSERA_RUN_ID=" + result_.run_id; }
  std::vector<pid_t> groups() const;

  void turn();
  int time_left() const;
  void on_signal(const signalfd_siginfo& signal);
  void on_ends(pid_t first);
  void blame();
  void on_interrupt(int signal, bool by_terminal);
  void on_deadline();
  void on_write_error(int error);

  void send(int signal, bool by_terminal = false);
  void stop_for_terminal();
  void end_ranks(int status, int signal, milliseconds grace, bool by_terminal = false);
  void kill_ranks();
  void begin_emptying();
  void set_deadline(milliseconds from_now) { deadline_ = Clock::now() + from_now; }

  const LaunchOptions& options_;
  const Clock::time_point started_ = Clock::now();
  SignalScope signals_;
  RankStreams streams_;
  bool first_in_our_group_ = false;
  std::vector<RankProcess> ranks_;
  Stage stage_ = Stage::Running;
  std::vector<int> failed_;  ///< in the order in which they failed
  std::optional<Clock::time_point> deadline_;
  Clock::time_point asked_{};
  LaunchResult result_;
};

void Supervisor::start() {
  const LaunchPlace place{options_.ranks, result_.run_id, free_port(), usable_cores(), options_.extra_environment};
  // A process outside the terminal's foreground group is stopped when it reads from the terminal.
  first_in_our_group_ = ::isatty(STDIN_FILENO) == 1 || (!options_.prefix_output && streams_.on_terminal());
  ranks_.reserve(options_.ranks);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    ranks_.push_back(RankProcess::start({.command = options_.command,
                                         .environment = rank_environment(rank, place, environ),
                                         .own_group = rank != 0 || !first_in_our_group_,
                                         .inherit_input = rank == 0,
                                         .capture = rank != 0 || options_.prefix_output,
                                         .before_exec = [this] { signals_.restore_in_child(); }}));
    streams_.connect(rank, ranks_.back().take_output(), ranks_.back().take_errors());
  }
}

/// Ends a launch that did not get off the ground.
void Supervisor::abandon() {
  for (const auto& rank : ranks_) rank.send(SIGKILL);
  sweep(groups(), marker());
  for (const auto& rank : ranks_) ::waitpid(rank.pid(), nullptr, 0);
  ranks_.clear();
}

std::vector<pid_t> Supervisor::groups() const {
  std::vector<pid_t> groups;
  for (size_t rank = first_in_our_group_ ? 1 : 0; rank < ranks_.size(); ++rank) groups.push_back(ranks_[rank].pid());
  return groups;
}

/// Waits for whatever comes next, and deals with it.
void Supervisor::turn() {
  std::vector<pollfd> waits{{signals_.descriptor(), POLLIN, 0}};
  streams_.add_waits(waits);
  ::poll(waits.data(), waits.size(), time_left());
  while (const auto signal = signals_.next()) on_signal(*signal);
  streams_.handle(std::span(waits).subspan(1));
  if (streams_.error() != 0) on_write_error(streams_.error());
  on_deadline();
  const bool ended =
      std::all_of(ranks_.begin(), ranks_.end(), [](const RankProcess& rank) { return rank.end().has_value(); });
  if (ended && stage_ == Stage::Settling) blame();
  if (ended && stage_ < Stage::Emptying) begin_emptying();
  if (stage_ == Stage::Emptying && streams_.delivered()) stage_ = Stage::Done;
}

int Supervisor::time_left() const {
  if (streams_.readable()) return 0;
  if (!deadline_) return -1;
  const auto left = std::chrono::ceil<milliseconds>(*deadline_ - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

void Supervisor::on_signal(const signalfd_siginfo& signal) {
  const int number = static_cast<int>(signal.ssi_signo);
  const bool by_terminal = signal.ssi_code == SI_KERNEL;
  switch (number) {
    case SIGCHLD:
      return on_ends(static_cast<pid_t>(signal.ssi_pid));
    case SIGUSR1:
    case SIGUSR2:
      return send(number);
    case SIGTSTP:
      return stop_for_terminal();
    default:
      return on_interrupt(number, by_terminal);
  }
}

/// `first` is the process that ended first of those that ended since we last looked; the kernel merges the others' signals
/// into its.
void Supervisor::on_ends(pid_t first) {
  std::vector<int> failed;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].end()) continue;
    const auto& end = ranks_[rank].poll_end();
    if (end && end->failed()) failed.push_back(static_cast<int>(rank));
  }
  if (failed.empty() || stage_ > Stage::Settling) return;
  const auto earliest = std::find_if(failed.begin(), failed.end(), [&](int rank) { return ranks_[rank].pid() == first; });
  if (earliest != failed.end()) std::rotate(failed.begin(), earliest, earliest + 1);
  failed_.insert(failed_.end(), failed.begin(), failed.end());
  if (stage_ == Stage::Running) set_deadline(kSettle);
  stage_ = Stage::Settling;
}

/// The cause is the first to fail, unless one was killed at nearly the same time: its peers see its sockets and mappings
/// close before the kernel tells us, and may fail of that first. No peer makes a process die of such a signal.
void Supervisor::blame() {
  const auto killed = [&](int rank) {
    const int signal = ranks_[rank].end()->signal;
    return signal == SIGKILL || signal == SIGSEGV || signal == SIGBUS || signal == SIGILL || signal == SIGFPE;
  };
  const auto found = std::find_if(failed_.begin(), failed_.end(), killed);
  if (found != failed_.end()) std::rotate(failed_.begin(), found, found + 1);
  const int cause = failed_.front();
  result_.failure = RankFailure{cause, ranks_[cause].pid(), *ranks_[cause].end(), {}};
  result_.also_failed.assign(failed_.begin() + 1, failed_.end());
  end_ranks(result_.failure->end.status(), SIGTERM, options_.grace);
}

void Supervisor::on_interrupt(int signal, bool by_terminal) {
  const bool again = asked_ != Clock::time_point{} && Clock::now() - asked_ >= kRepeat;
  if (stage_ <= Stage::Settling) {
    result_.interrupted_by = signal;
    asked_ = Clock::now();
    end_ranks(128 + signal, signal, options_.interrupt_grace, by_terminal);
  } else if (stage_ == Stage::Ending && (again || result_.interrupted_by == 0)) {
    kill_ranks();
  } else if (stage_ == Stage::Emptying) {
    if (result_.status == 0) result_.status = 128 + (result_.interrupted_by = signal);
    stage_ = Stage::Done;
  }
}

void Supervisor::on_deadline() {
  if (!deadline_ || Clock::now() < *deadline_) return;
  if (stage_ == Stage::Settling) return blame();
  if (stage_ == Stage::Ending) return kill_ranks();
  if (stage_ == Stage::Emptying) stage_ = Stage::Done;
  if (stage_ == Stage::Killing) begin_emptying();
}

void Supervisor::on_write_error(int error) {
  const bool nobody_reads = error == EPIPE;
  if (!nobody_reads) result_.problem = text("the ranks' output can't be written: ", std::strerror(error));
  const int status = nobody_reads ? 128 + SIGPIPE : 1;
  if (stage_ == Stage::Running)
    end_ranks(status, SIGTERM, options_.grace);
  else if (result_.status == 0)
    result_.status = status;
}

/// The terminal itself has signalled our group, and so rank 0 if that is in it.
void Supervisor::send(int signal, bool by_terminal) {
  for (size_t rank = by_terminal && first_in_our_group_ ? 1 : 0; rank < ranks_.size(); ++rank) ranks_[rank].send(signal);
}

void Supervisor::stop_for_terminal() {
  send(SIGSTOP);
  ::kill(::getpid(), SIGSTOP);
  send(SIGCONT);
}

void Supervisor::end_ranks(int status, int signal, milliseconds grace, bool by_terminal) {
  result_.status = status;
  stage_ = Stage::Ending;
  set_deadline(grace);
  send(signal, by_terminal);
}

void Supervisor::kill_ranks() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank)
    if (!ranks_[rank].end()) result_.killed.push_back(static_cast<int>(rank));
  stage_ = Stage::Killing;
  set_deadline(kUnkillable);
  send(SIGKILL);
}

/// No rank is left (or none that could be killed): end what they started, and deliver what they wrote.
void Supervisor::begin_emptying() {
  sweep(groups(), marker());
  if (stage_ == Stage::Running)
    deadline_.reset();  // all went well: a slow reader gets all the time it needs
  else
    set_deadline(kLastOutput);
  stage_ = Stage::Emptying;
  streams_.expect_no_more();
}

}  // namespace

LaunchResult run_ranks(const LaunchOptions& options) {
  check(options);
  open_standard_streams();
  return Supervisor(options).run();
}

}  // namespace tessera::cli
