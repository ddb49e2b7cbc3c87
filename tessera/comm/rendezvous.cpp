#include "tessera/comm/rendezvous.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/un.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <thread>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

constexpr uint32_t kProtocol = 0x7e55e7a1;  // changes with every change of what follows
constexpr int kMaxRanks = 256;

struct Hello {  // from a rank to local rank 0
  uint32_t protocol = kProtocol;
  int32_t local_rank = 0;
  int32_t local_size = 0;
  int32_t process = 0;
};
struct Welcome {  // the answer; the memfd travels beside it
  uint32_t protocol = kProtocol;
  int64_t bytes = 0;
  int32_t processes[kMaxRanks] = {};
};

[[noreturn]] void refuse(const std::string& what) { throw SystemError(text(what, ": ", std::strerror(errno))); }

sockaddr_un address_of(const World& world, int generation, socklen_t& length) {
  const std::string key = text(world.run, "#", generation, "#", world.local_size);
  const auto hash = XXH3_128bits(key.data(), key.size());
  char name[80];
  std::snprintf(name, sizeof name, "tessera-%u-%016llx%016llx", getuid(), static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path + 1, name, sizeof address.sun_path - 2);  // a leading zero: the abstract name space
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::strlen(name));
  return address;
}

bool same_user(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 && credentials.uid == getuid();
}

int remaining_ms(Deadline deadline) {
  return static_cast<int>(
      std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count()));
}

bool receive_exactly(int socket, void* to, size_t bytes, Deadline deadline) {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    pollfd ready{socket, POLLIN, 0};
    if (poll(&ready, 1, remaining_ms(deadline)) <= 0) return false;
    const ssize_t got = recv(socket, at, bytes, 0);
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

void send_welcome(int socket, const Welcome& welcome, int memory) {
  iovec part{const_cast<Welcome*>(&welcome), sizeof welcome};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &memory, sizeof memory);
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof welcome))
    refuse("could not hand the shared memory to a rank of this run");
}

bool receive_welcome(int socket, Welcome& welcome, Descriptor& memory, Deadline deadline) {
  pollfd ready{socket, POLLIN, 0};
  if (poll(&ready, 1, remaining_ms(deadline)) <= 0) return false;
  iovec part{&welcome, sizeof welcome};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) return false;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    memory = Descriptor(fd);
  }
  return memory.open() && receive_exactly(socket, reinterpret_cast<char*>(&welcome) + got,
                                          sizeof welcome - static_cast<size_t>(got), deadline);
}

// Where the system refuses memfds (seccomp filters of some containers do): a file in /dev/shm that never has a name, so that
// nobody else can open it and none is left behind.
Descriptor nameless_file() {
  const int memfd_error = errno;
  struct statvfs room {};
  Descriptor memory(open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!memory.open() || fstatvfs(memory.get(), &room) != 0)
    throw SystemError(text("the system refuses a memfd (", std::strerror(memfd_error), ") and a nameless file in /dev/shm (",
                           std::strerror(errno),
                           "), one of which ranks of one host share memory through; allow "
                           "memfd_create in the container, or mount a tmpfs on /dev/shm"));
  std::fprintf(
      stderr,
      "tessera: the system refuses memfds (%s), so ranks share memory in /dev/shm, of which %llu MiB are free: a run "
      "that needs more is ended by SIGBUS. Allow memfd_create in the container, or make /dev/shm larger\n",
      std::strerror(memfd_error), static_cast<unsigned long long>(room.f_bavail * room.f_frsize >> 20));
  return memory;
}

Descriptor create_memory(int64_t bytes) {
  Descriptor memory(memfd_create("tessera", MFD_CLOEXEC));
  if (!memory.open()) memory = nameless_file();
  if (ftruncate(memory.get(), bytes) != 0) refuse(text("the system refuses a sparse file of ", bytes, " bytes in memory"));
  return memory;
}

std::string ranks_without(const std::vector<Descriptor>& guests) {
  std::string missing;
  for (size_t rank = 1; rank < guests.size(); ++rank)
    if (!guests[rank].open()) missing += text(missing.empty() ? "" : ", ", rank);
  return missing;
}

Meeting host(const World& world, int generation, int64_t bytes, Deadline deadline) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(world, generation, length);
  const Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener.open()) refuse("could not create a Unix socket");
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
    refuse(errno == EADDRINUSE ? "another run with the same launcher identity is starting on this host; give each run its "
                                 "own MASTER_PORT or job"
                               : "could not bind the Unix socket of this run");
  if (listen(listener.get(), kMaxRanks) != 0) refuse("could not listen on the Unix socket of this run");

  Meeting meeting{create_memory(bytes), bytes, std::vector<int>(static_cast<size_t>(world.local_size))};
  meeting.process_ids[0] = getpid();
  std::vector<Descriptor> guests(static_cast<size_t>(world.local_size));
  for (std::string missing; !(missing = ranks_without(guests)).empty();) {
    pollfd ready{listener.get(), POLLIN, 0};
    if (poll(&ready, 1, remaining_ms(deadline)) <= 0)
      throw PeerError(
          text("local ranks ", missing, " of ", world.local_size, " did not come to the start of this run in time"));
    Descriptor guest(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Hello hello;
    if (!guest.open() || !same_user(guest.get()) || !receive_exactly(guest.get(), &hello, sizeof hello, deadline))
      continue;  // a stranger
    if (hello.protocol != kProtocol)
      throw AgreementError("a rank of this run uses another version of Tessera; install the same on all");
    if (hello.local_size != world.local_size || hello.local_rank < 1 || hello.local_rank >= world.local_size)
      throw AgreementError(text("a process joined as local rank ", hello.local_rank, " of ", hello.local_size,
                                ", but this run has ", world.local_size, " local ranks"));
    const auto rank = static_cast<size_t>(hello.local_rank);
    if (guests[rank].open())
      throw AgreementError(
          text("two processes joined as local rank ", rank, " (", meeting.process_ids[rank], " and ", hello.process, ")"));
    guests[rank] = std::move(guest);
    meeting.process_ids[rank] = hello.process;
  }
  Welcome welcome{.bytes = bytes};
  std::copy(meeting.process_ids.begin(), meeting.process_ids.end(), welcome.processes);
  for (size_t rank = 1; rank < guests.size(); ++rank) send_welcome(guests[rank].get(), welcome, meeting.memory.get());
  return meeting;
}

Meeting join(const World& world, int generation, Deadline deadline) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(world, generation, length);
  while (true) {
    const Descriptor host(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!host.open()) refuse("could not create a Unix socket");
    if (connect(host.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) {
      if (!same_user(host.get())) throw SystemError("another user's process listens where local rank 0 of this run should");
      const Hello hello{.local_rank = world.local_rank.value, .local_size = world.local_size, .process = getpid()};
      Welcome welcome;
      Descriptor memory;
      if (send(host.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello ||
          !receive_welcome(host.get(), welcome, memory, deadline))
        throw PeerError("local rank 0 ended while the ranks of this run were meeting");
      return {std::move(memory), welcome.bytes, {welcome.processes, welcome.processes + world.local_size}};
    }
    if (Clock::now() > deadline) throw PeerError("local rank 0 did not come to the start of this run in time");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

Meeting meet(const World& world, int generation, int64_t bytes, std::chrono::milliseconds timeout) {
  if (world.local_size != world.size)
    throw ConfigError(text("this run has ", world.size, " ranks, but only ", world.local_size,
                           " on this host; shared memory joins the ranks of one host only"));
  if (world.local_size > kMaxRanks)
    throw ConfigError(text("at most ", kMaxRanks, " ranks share one host's memory, not ", world.local_size));
  const Deadline deadline = Clock::now() + timeout;
  return world.local_rank.value == 0 ? host(world, generation, bytes, deadline) : join(world, generation, deadline);
}

}  // namespace tessera
