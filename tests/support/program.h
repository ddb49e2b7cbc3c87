#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cli/process_sweep.h"
#include "cli/rank_environment.h"
#include "cli/rank_process.h"
#include "tessera/base/environment.h"
#include "tessera/base/text.h"
#include "tests/support/test_folder.h"

namespace tessera::cli {

/// The program under test: TESSERA_PROGRAM, or the one that was built beside this test. Nothing if that is not there (the
/// sanitizers' build leaves it out).
inline std::optional<std::string> program() {
  if (auto named = environment("TESSERA_PROGRAM")) return named;
  const auto beside = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "tessera";
  if (std::filesystem::exists(beside)) return beside.string();
  return std::nullopt;
}

#define TESSERA_NEEDS_PROGRAM \
  if (!::tessera::cli::program()) GTEST_SKIP() << "the program is not built here"

using test::TestFolder;

/// The program running with `arguments`, outside any launcher. What it prints is collected until it ends.
class ProgramRun {
 public:
  explicit ProgramRun(const std::vector<std::string>& arguments, const std::vector<std::string>& more_environment = {}) {
    RankStart start{.command = {*program()}, .environment = environment_with(more_environment), .before_exec = [] {}};
    start.command.insert(start.command.end(), arguments.begin(), arguments.end());
    start.environment.push_back(mark());
    process_.emplace(RankProcess::start(start));
  }
  ~ProgramRun() {
    if (!process_->poll_end()) process_->send(SIGKILL);
    while (!process_->poll_end()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    process_->reap();
    sweep({}, mark());
  }
  ProgramRun(const ProgramRun&) = delete;
  ProgramRun& operator=(const ProgramRun&) = delete;

  const std::string& out() const { return text_[0]; }
  const std::string& err() const { return text_[1]; }
  void send(int signal) const { process_->send(signal); }
  auto processes() const { return processes_with(mark()); }
  bool nothing_left() const { return processes_with(mark()).empty(); }

  /// Reads until stderr holds `wanted`, or the program ends.
  bool await_error(const std::string& wanted) {
    collect([&] { return err().find(wanted) != std::string::npos; });
    return err().find(wanted) != std::string::npos;
  }

  /// The exit status as a shell has it; −1 if it runs on for a hundred seconds.
  int status() {
    collect([] { return false; });
    return process_->end() ? process_->end()->status() : -1;
  }

 private:
  std::string mark() const { return "TESSERA_TEST_MARK=" + mark_; }

  // Ours without what a launcher sets, and with `entries`.
  static std::vector<std::string> environment_with(std::vector<std::string> entries) {
    std::vector<std::string> left_out{
        "RANK=", "WORLD_SIZE=", "LOCAL_RANK=", "LOCAL_WORLD_SIZE=", "OMPI_", "SLURM_", "TESSERA_"};
    for (const auto& entry : entries) left_out.push_back(entry.substr(0, entry.find('=') + 1));
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string_view kept(*entry);
      if (std::none_of(left_out.begin(), left_out.end(), [&](const auto& prefix) { return kept.starts_with(prefix); }))
        entries.emplace_back(kept);
    }
    return entries;
  }

  template <class Done>
  void collect(Done done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
    while (!done() && std::chrono::steady_clock::now() < deadline) {
      const bool ended = process_->poll_end().has_value();
      bool more = false;
      pollfd waits[] = {{process_->output().get(), POLLIN, 0}, {process_->errors().get(), POLLIN, 0}};
      ::poll(waits, 2, ended ? 0 : 20);
      for (int i = 0; i < 2; ++i) {
        char bytes[1 << 14];
        const ssize_t count = (waits[i].revents & POLLIN) != 0 ? ::read(waits[i].fd, bytes, sizeof bytes) : 0;
        if (count > 0) text_[i].append(bytes, static_cast<size_t>(count));
        more = more || count > 0;
      }
      if (!more && !ended && (waits[0].revents & waits[1].revents & POLLHUP) != 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (ended && !more) return;
    }
  }

  std::string mark_ = random_id();
  std::optional<RankProcess> process_;
  std::string text_[2];
};

}  // namespace tessera::cli
