#include "cli/output_sink.h"

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace tessera::cli {
namespace {

constexpr size_t kFull = 1 << 20;

/// A writable pipe or terminal takes PIPE_BUF bytes without blocking, not more; a file always takes everything.
size_t bytes_at_once(int fd) {
  struct stat status;
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) ? kFull : PIPE_BUF;
}

}  // namespace

OutputSink::OutputSink(int fd) : fd_(fd), terminal_(::isatty(fd) == 1), at_once_(bytes_at_once(fd)) {}

void OutputSink::add(std::string_view bytes) {
  if (error_ == 0) bytes_ += bytes;
}

bool OutputSink::full() const { return waiting() >= kFull; }

void OutputSink::deliver() {
  if (empty()) return;
  const ssize_t count = ::write(fd_, bytes_.data() + written_, std::min(waiting(), at_once_));
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count < 0)
    error_ = errno;
  else
    written_ += static_cast<size_t>(count);
  if (empty() || error_ != 0 || written_ >= kFull) {
    bytes_.erase(0, error_ != 0 ? bytes_.size() : written_);
    written_ = 0;
  }
}

}  // namespace tessera::cli
