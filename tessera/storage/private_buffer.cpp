#include "tessera/storage/private_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

PrivateBuffer::PrivateBuffer(Bytes bytes, const char* what) : bytes_(bytes) {
  if (bytes.value == 0) return;
  void* mapped = mmap(nullptr, static_cast<size_t>(bytes.value), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    throw SystemError(text("the system refuses ", bytes.value, " bytes for ", what, ": ", std::strerror(errno)));
  madvise(mapped, static_cast<size_t>(bytes.value), MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(mapped);
}

PrivateBuffer::PrivateBuffer(PrivateBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, Bytes{})) {}

PrivateBuffer& PrivateBuffer::operator=(PrivateBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PrivateBuffer::~PrivateBuffer() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_.value));
}

}  // namespace tessera
