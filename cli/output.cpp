#include "cli/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "tessera/base/descriptor.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

[[noreturn]] void fail() { throw std::system_error(errno, std::generic_category()); }

void write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail();
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

// A file without a name where the file system has such: it vanishes if we are killed before it is whole.
Descriptor open_partial(const std::filesystem::path& folder, const std::filesystem::path& name, bool& named) {
  Descriptor unnamed(::open(folder.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666));
  named = !unnamed.open();
  if (!named) return unnamed;
  Descriptor file(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file.open()) fail();
  return file;
}

// On the disk before it gets its name: whoever finds the file finds all of it, also after a power cut.
void write_whole(const std::filesystem::path& file, std::string_view bytes) {
  const std::filesystem::path folder = std::filesystem::absolute(file).parent_path();
  const std::filesystem::path partial = text(file.string(), ".partial.", ::getpid());
  try {
    std::filesystem::create_directories(folder);
    bool named = false;
    const Descriptor descriptor = open_partial(folder, partial, named);
    write_all(descriptor.get(), bytes);
    if (::fsync(descriptor.get()) != 0) fail();
    const std::string handle = text("/proc/self/fd/", descriptor.get());
    if (!named && ::linkat(AT_FDCWD, handle.c_str(), AT_FDCWD, partial.c_str(), AT_SYMLINK_FOLLOW) != 0) fail();
    std::filesystem::rename(partial, file);
  } catch (const std::system_error& error) {
    ::unlink(partial.c_str());
    throw SystemError(text("file ", file, " (", bytes.size(), " bytes) can't be written: ", error.code().message()));
  }
}

}  // namespace

void print(std::string_view bytes) {
  std::fflush(stdout);  // what others left in the buffer comes first
  try {
    write_all(STDOUT_FILENO, bytes);
  } catch (const std::system_error& error) {
    throw SystemError(text("standard output can't be written: ", error.code().message()));
  }
}

void check_can_be_made(const char* option, const std::string& path) {
  std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  std::error_code error;
  while (!std::filesystem::exists(folder, error) && folder.has_relative_path()) folder = folder.parent_path();
  if (!std::filesystem::is_directory(folder, error))
    throw ConfigError(
        text("option ", option, " names '", path, "', but ", folder, " is not a directory; choose another place"));
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    throw ConfigError(text("option ", option, " names '", path, "', but nothing can be made in ", folder, ": ",
                           std::strerror(errno), "; choose another place"));
}

void check_json_destination(const std::string& destination) {
  if (destination == "-") return;
  std::error_code error;
  const auto status = std::filesystem::status(destination, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw ConfigError(text("option json names '", destination, "', which is ",
                           std::filesystem::is_directory(status) ? "a directory; name a file in it"
                                                                 : "no regular file; name one, or - for standard output"));
  check_can_be_made("json", destination);
}

void write_json(const std::string& destination, const nlohmann::json& value) {
  const std::string line = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
  if (destination == "-") return print(line);
  write_whole(destination, line);
}

}  // namespace tessera::cli
