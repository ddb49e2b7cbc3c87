#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::cli {

/// Bytes on their way to a descriptor that others own and that must stay blocking (our stdout). A reader that stalls never
/// stalls us: `deliver` writes only as much as the descriptor takes at once.
class OutputSink {
 public:
  explicit OutputSink(int fd);

  int descriptor() const { return fd_; }
  bool terminal() const { return terminal_; }
  void add(std::string_view bytes);
  bool empty() const { return waiting() == 0; }
  bool full() const;  ///< a mebibyte waits: whoever feeds it should stop until it is delivered

  /// Writes some of what waits; call it when poll says that the descriptor is writable.
  void deliver();

  /// The errno of the write that failed; 0 if none did. After a failure everything is dropped.
  int error() const { return error_; }

 private:
  size_t waiting() const { return bytes_.size() - written_; }

  int fd_;
  bool terminal_;
  size_t at_once_;
  std::string bytes_;
  size_t written_ = 0;
  int error_ = 0;
};

}  // namespace tessera::cli
