#include "cli/machine_calls.h"

#include <linux/futex.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "tessera/base/descriptor.h"

namespace tessera::cli {
namespace {

using nlohmann::json;

json outcome(bool works) { return works ? json(nullptr) : json(std::strerror(errno)); }

json try_memfd() {
  const Descriptor memory(::memfd_create("tessera-doctor", MFD_CLOEXEC));
  constexpr size_t kSize = 4096;
  if (!memory.open() || ::ftruncate(memory.get(), kSize) != 0) return outcome(false);
  void* const mapping = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapping == MAP_FAILED) return outcome(false);
  *static_cast<volatile char*>(mapping) = 1;
  ::munmap(mapping, kSize);
  return nullptr;
}

json try_pidfd() {
  const Descriptor process(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  pollfd wait{process.get(), POLLIN, 0};
  return outcome(process.open() && ::poll(&wait, 1, 0) == 0);
}

json try_futex() {
  uint32_t word = 0;
  return outcome(::syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0) == 0);
}

/// Sends a descriptor through a Unix socket to ourselves, as ranks hand their mappings to each other.
json try_descriptor_passing() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return outcome(false);
  const Descriptor sender(ends[0]), receiver(ends[1]);
  char byte = 0;
  iovec bytes{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &ends[0], sizeof(int));
  if (::sendmsg(sender.get(), &message, 0) != 1 || ::recvmsg(receiver.get(), &message, MSG_CMSG_CLOEXEC) != 1)
    return outcome(false);
  const cmsghdr* const received = CMSG_FIRSTHDR(&message);
  if (received == nullptr || received->cmsg_type != SCM_RIGHTS) return "the descriptor did not arrive";
  int descriptor;
  std::memcpy(&descriptor, CMSG_DATA(received), sizeof descriptor);
  const Descriptor owned(descriptor);
  return nullptr;
}

json try_io_uring() {
  io_uring_params parameters{};
  const Descriptor ring(static_cast<int>(::syscall(SYS_io_uring_setup, 1, &parameters)));
  return outcome(ring.open());
}

json limit(__rlimit_resource resource) {
  rlimit value{};
  if (::getrlimit(resource, &value) != 0 || value.rlim_cur == RLIM_INFINITY) return nullptr;
  return value.rlim_cur;
}

}  // namespace

json try_system_calls() {
  return {{"memfd", try_memfd()},
          {"pidfd", try_pidfd()},
          {"futex", try_futex()},
          {"descriptor_passing", try_descriptor_passing()},
          {"io_uring", try_io_uring()}};
}

json try_dev_shm() {
  struct statvfs status {};
  if (::statvfs("/dev/shm", &status) != 0) return nullptr;
  return {{"size_bytes", status.f_blocks * status.f_frsize},
          {"free_bytes", status.f_bavail * status.f_frsize},
          {"writable", ::access("/dev/shm", W_OK | X_OK) == 0}};
}

json read_limits() {
  return {{"open_files", limit(RLIMIT_NOFILE)},
          {"locked_bytes", limit(RLIMIT_MEMLOCK)},
          {"address_space_bytes", limit(RLIMIT_AS)},
          {"processes", limit(RLIMIT_NPROC)}};
}

}  // namespace tessera::cli
