#include "models/text_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {

std::string read_file(const std::filesystem::path& file) {
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  if (!std::filesystem::exists(status))
    throw DataError(text("file ", file, " can't be opened: ", error ? error.message() : std::string("it does not exist")));
  if (std::filesystem::is_directory(status)) throw DataError(text("file ", file, " is a directory: name a file in it"));
  if (!std::filesystem::is_regular_file(status))
    throw DataError(text("file ", file, " is not a regular file: copy what it gives to one"));
  errno = 0;
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw DataError(text("file ", file, " can't be opened: ", std::strerror(errno)));
  std::string bytes(std::istreambuf_iterator<char>(stream), {});
  if (stream.bad()) throw DataError(text("file ", file, " can't be read: ", std::strerror(errno)));
  if (bytes.empty()) throw DataError(text("file ", file, " is empty"));
  return bytes;
}

void write_file(const std::filesystem::path& file, std::string_view bytes) {
  auto neighbour = file;
  neighbour += text(".partial.", ::getpid());
  std::error_code error;
  if (file.has_parent_path()) std::filesystem::create_directories(file.parent_path(), error);
  if (!error) {
    errno = 0;
    std::ofstream stream(neighbour, std::ios::binary | std::ios::trunc);
    stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    stream.close();
    if (stream)
      std::filesystem::rename(neighbour, file, error);
    else
      error = {errno != 0 ? errno : EIO, std::generic_category()};
  }
  if (!error) return;
  std::error_code ignored;  // the first failure is the one to tell
  std::filesystem::remove(neighbour, ignored);
  throw SystemError(text("file ", file, " (", bytes.size(), " bytes) can't be written: ", error.message()));
}

}  // namespace tessera::models
