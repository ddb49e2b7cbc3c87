#pragma once

#include <stdexcept>
#include <string>

namespace tessera {

/// A fault of this library, not of its user. Please report the message.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] inline void fail_check(const char* condition, const char* file, int line, const std::string& detail) {
  throw InternalError(std::string("tessera internal check failed: ") + condition + " at " + file + ":" +
                      std::to_string(line) + (detail.empty() ? "" : " (" + detail + ")"));
}

}  // namespace tessera

/// Checks an invariant of our own. `detail` (a std::string) is evaluated only on failure.
#define TESSERA_CHECK(condition, detail)                                             \
  do {                                                                               \
    if (!(condition)) ::tessera::fail_check(#condition, __FILE__, __LINE__, detail); \
  } while (false)
