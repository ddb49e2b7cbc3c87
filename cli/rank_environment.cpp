#include "cli/rank_environment.h"

#include <netinet/in.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <string_view>

#include "tessera/base/descriptor.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::cli {

std::vector<std::string> rank_environment(int rank, const LaunchPlace& place, const char* const* inherited) {
  std::map<std::string, std::string> values;
  for (; *inherited != nullptr; ++inherited) {
    const std::string_view entry(*inherited);
    const size_t equals = entry.find('=');
    if (equals != std::string_view::npos) values.emplace(entry.substr(0, equals), entry.substr(equals + 1));
  }
  const std::string self = std::to_string(rank), all = std::to_string(place.ranks);
  const std::pair<const char*, std::string> ours[] = {
      {"RANK", self},
      {"LOCAL_RANK", self},
      {"ROLE_RANK", self},
      {"GROUP_RANK", "0"},
      {"WORLD_SIZE", all},
      {"LOCAL_WORLD_SIZE", all},
      {"ROLE_WORLD_SIZE", all},
      {"GROUP_WORLD_SIZE", "1"},
      {"ROLE_NAME", "default"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(place.port)},
      {"TORCHELASTIC_RUN_ID", place.run_id},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      // Otherwise rank 0 of a PyTorch program would wait for a store that an outer torchrun keeps, instead of opening its
      // own.
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TESSERA_RUN_ID", place.run_id},
  };
  for (const auto& [name, value] : ours) values[name] = value;
  values.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, place.cores / place.ranks)));
  for (const auto& [name, value] : place.extra_environment) values[name] = value;

  std::vector<std::string> entries;
  for (const auto& [name, value] : values) entries.push_back(name + "=" + value);
  return entries;
}

std::string random_id() {
  std::array<unsigned char, 16> bytes;
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw SystemError(text("the system gives no random numbers: ", std::strerror(errno)));
  std::string digits;
  for (const unsigned char byte : bytes) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

uint16_t free_port() {
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (!socket.open() || ::bind(socket.get(), any, size) != 0 || ::getsockname(socket.get(), any, &size) != 0)
    throw SystemError(text("no free TCP port on 127.0.0.1: ", std::strerror(errno)));
  return ntohs(address.sin_port);
}

int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // Fails on machines with more cores than the set holds; one is then a safe answer, and OMP_NUM_THREADS overrides it.
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

}  // namespace tessera::cli
