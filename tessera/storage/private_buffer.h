#pragma once

#include <cstddef>

#include "tessera/base/types.h"

namespace tessera {

/// Zeroed memory of this process alone, on huge pages where the system gives them. Pages cost nothing until touched.
class PrivateBuffer {
 public:
  PrivateBuffer() = default;
  /// Throws SystemError if the system refuses the address range. `what` names the purpose in the message.
  PrivateBuffer(Bytes bytes, const char* what);
  PrivateBuffer(PrivateBuffer&& other) noexcept;
  PrivateBuffer& operator=(PrivateBuffer&& other) noexcept;
  ~PrivateBuffer();

  std::byte* data() const { return data_; }
  Bytes bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  Bytes bytes_;
};

}  // namespace tessera
