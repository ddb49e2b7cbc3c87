#include "cli/run_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::cli {

RunLog::RunLog(const std::filesystem::path& directory) : file_(directory / "log.jsonl") {
  std::error_code ignored;  // opening the file says what is wrong
  std::filesystem::create_directories(directory, ignored);
  descriptor_ = Descriptor(open(file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!descriptor_.open())
    throw SystemError(
        text("can't write the log ", file_.string(), ": ", std::strerror(errno), "; choose another --run-directory"));
}

void RunLog::write(const nlohmann::json& line) {
  const std::string words = line.dump() + "\n";
  struct stat before {};
  fstat(descriptor_.get(), &before);
  errno = 0;
  if (::write(descriptor_.get(), words.data(), words.size()) == static_cast<ssize_t>(words.size())) return;
  const int reason = errno == 0 ? ENOSPC : errno;
  if (S_ISREG(before.st_mode) && ftruncate(descriptor_.get(), before.st_size) != 0) errno = reason;
  throw SystemError(text("can't write the log ", file_.string(), ": ", std::strerror(reason),
                         "; free some space or choose another --run-directory"));
}

}  // namespace tessera::cli
