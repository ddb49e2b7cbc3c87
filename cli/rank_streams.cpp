#include "cli/rank_streams.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace tessera::cli {

RankStreams::RankStreams(int ranks, bool shown)
    : shown_(shown), output_(STDOUT_FILENO), errors_(STDERR_FILENO), tails_(ranks) {}

void RankStreams::connect(int rank, Descriptor output, Descriptor errors) {
  if (output.open()) add(rank, std::move(output), output_);
  if (errors.open()) add(rank, std::move(errors), errors_);
}

void RankStreams::add(int rank, Descriptor pipe, OutputSink& sink) {
  OutputSink* const destination = shown_ ? &sink : nullptr;
  auto emit = [&tail = tails_[rank], destination,
               prefix = rank_prefix(rank, sink.terminal() && colour_wanted())](std::string_view line) {
    tail.add(line);
    if (destination == nullptr) return;
    destination->add(prefix);
    destination->add(line);
    destination->add("\n");
  };
  channels_.push_back({std::move(pipe), LineCutter(std::move(emit)), destination});
}

void RankStreams::add_waits(std::vector<pollfd>& waits) const {
  for (const OutputSink* sink : {&output_, &errors_}) waits.push_back({sink->empty() ? -1 : sink->descriptor(), POLLOUT, 0});
  for (const Channel& channel : channels_) waits.push_back({channel.blocked() ? -1 : channel.pipe.get(), POLLIN, 0});
}

void RankStreams::handle(std::span<const pollfd> polled) {
  if (polled[0].revents != 0) output_.deliver();
  if (polled[1].revents != 0) errors_.deliver();
  for (size_t i = 0; i < channels_.size(); ++i)
    if (polled[2 + i].revents != 0 || complete_) read(channels_[i]);
}

void RankStreams::read(Channel& channel) {
  if (!channel.pipe.open() || channel.blocked()) return;
  char bytes[64 << 10];
  const ssize_t count = ::read(channel.pipe.get(), bytes, sizeof bytes);
  if (count > 0) return channel.lines.feed({bytes, static_cast<size_t>(count)}, LineCutter::Clock::now());
  if (count < 0 && (errno == EINTR || (errno == EAGAIN && !complete_))) return;
  channel.lines.finish();
  channel.pipe.close();
}

bool RankStreams::readable() const {
  const auto ready = [](const Channel& channel) { return channel.pipe.open() && !channel.blocked(); };
  return complete_ && std::any_of(channels_.begin(), channels_.end(), ready);
}

bool RankStreams::delivered() const {
  const auto open = [](const Channel& channel) { return channel.pipe.open(); };
  return output_.empty() && errors_.empty() && std::none_of(channels_.begin(), channels_.end(), open);
}

}  // namespace tessera::cli
