#pragma once

#include <poll.h>

#include <span>
#include <string>
#include <vector>

#include "cli/output_sink.h"
#include "cli/rank_output.h"
#include "tessera/base/descriptor.h"

namespace tessera::cli {

/// The output of all ranks on its way to ours: prefixed line by line, or only kept. Never blocks: where our reader is slow,
/// the ranks wait for it, as they would if they wrote to it themselves.
class RankStreams {
 public:
  /// `shown`: lines go to our stdout and stderr; otherwise each rank's last ones are kept, and that is all.
  RankStreams(int ranks, bool shown);
  RankStreams(const RankStreams&) = delete;
  RankStreams& operator=(const RankStreams&) = delete;

  /// Takes the reading ends of a rank's stdout and stderr, which don't block; a closed one is left out.
  void connect(int rank, Descriptor output, Descriptor errors);

  /// What to poll for, and what to do afterwards; always the same number of entries, unused ones with descriptor −1.
  void add_waits(std::vector<pollfd>& waits) const;
  void handle(std::span<const pollfd> polled);

  /// No rank is left to write. From now on `handle` closes a pipe that holds nothing more, even if a process that escaped us
  /// keeps the other end open.
  void expect_no_more() { complete_ = true; }
  bool readable() const;   ///< after `expect_no_more`: `handle` has something to read, so that polling must not wait
  bool delivered() const;  ///< all pipes are closed and all lines written

  /// The errno of the first write to our stdout or stderr that failed, 0 if none did.
  int error() const { return output_.error() != 0 ? output_.error() : errors_.error(); }

  bool on_terminal() const { return output_.terminal() || errors_.terminal(); }
  std::vector<std::string> last_lines(int rank) const { return tails_[rank].lines(); }

 private:
  struct Channel {
    Descriptor pipe;
    LineCutter lines;
    OutputSink* sink;  ///< null: nothing is shown

    bool blocked() const { return sink != nullptr && sink->full(); }
  };

  void add(int rank, Descriptor pipe, OutputSink& sink);
  void read(Channel& channel);

  bool shown_;
  bool complete_ = false;
  OutputSink output_;
  OutputSink errors_;
  std::vector<Tail> tails_;
  std::vector<Channel> channels_;
};

}  // namespace tessera::cli
