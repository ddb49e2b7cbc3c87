#include "cli/launch_command.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

std::string signal_name(int signal) {
  const char* const name = ::sigabbrev_np(signal);
  return name != nullptr ? text("SIG", name) : text("signal ", signal);
}

std::string describe_end(const RankEnd& end) {
  if (end.signal == 0) return text("ended with exit code ", end.exit_code);
  return text("was killed by ", signal_name(end.signal), " (", ::strsignal(end.signal),
              end.core_dumped ? ", core dumped" : "", ")",
              end.signal == SIGKILL ? ", as the kernel does when memory runs out (see dmesg)" : "");
}

std::string list(const std::vector<int>& ranks) {
  std::string names;
  for (const int rank : ranks) names += text(names.empty() ? "" : ", ", rank);
  return names;
}

/// JSON holds only UTF-8; a program may print anything.
nlohmann::json readable(const std::vector<std::string>& lines) {
  return nlohmann::json::parse(nlohmann::json(lines).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

std::string explain_failure(const LaunchResult& result) {
  const RankFailure& failure = *result.failure;
  std::ostringstream out;
  out << "tessera: rank " << failure.rank << " of " << result.ranks << " (process " << failure.pid << ") "
      << describe_end(failure.end);
  if (!result.also_failed.empty()) out << "; at the same moment rank " << list(result.also_failed) << " failed too";
  if (result.ranks > 1) out << "; the launch was ended";
  out << ".\n";
  if (!failure.last_lines.empty()) out << "Its last lines:\n";
  for (const auto& line : failure.last_lines) out << "  " << line << '\n';
  return out.str();
}

}  // namespace

std::string explain(const LaunchResult& result) {
  std::string message;
  if (!result.problem.empty()) message = text("tessera: ", result.problem, '\n');
  if (result.failure) message += explain_failure(result);
  if (result.interrupted_by != 0) message += text("tessera: ended by ", signal_name(result.interrupted_by), ".\n");
  if (!message.empty() && !result.killed.empty())
    message += text("Rank ", list(result.killed), " did not end when asked to and was killed.\n");
  return message;
}

int launch(const LaunchOptions& options) {
  const LaunchResult result = run_ranks(options);
  const bool nobody_reads =
      !options.prefix_output && result.failure && result.failure->rank == 0 && result.failure->end.signal == SIGPIPE;
  if (nobody_reads)
    return result.status;  // rank 0 writes to our stdout itself, and ends as any program does that has no reader
  const std::string message = explain(result);
  // Rank 0 may have left a progress bar in the terminal's last line.
  if (!message.empty() && !options.prefix_output && ::isatty(STDERR_FILENO) == 1) std::fputc('\n', stderr);
  std::fputs(message.c_str(), stderr);
  return result.status;
}

nlohmann::json to_json(const LaunchResult& result) {
  nlohmann::json json{{"ranks", result.ranks},     {"exit_status", result.status}, {"run_id", result.run_id},
                      {"seconds", result.seconds}, {"failure", nullptr},           {"also_failed", result.also_failed},
                      {"interrupted_by", nullptr}, {"killed", result.killed},      {"problem", nullptr}};
  if (const auto& failure = result.failure) {
    const RankEnd& end = failure->end;
    json["failure"] = {{"rank", failure->rank},
                       {"pid", failure->pid},
                       {"exit_code", nullptr},
                       {"signal", nullptr},
                       {"last_lines", readable(failure->last_lines)}};
    if (end.signal != 0)
      json["failure"]["signal"] = signal_name(end.signal);
    else
      json["failure"]["exit_code"] = end.exit_code;
  }
  if (result.interrupted_by != 0) json["interrupted_by"] = signal_name(result.interrupted_by);
  if (!result.problem.empty()) json["problem"] = result.problem;
  return json;
}

}  // namespace tessera::cli
