#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

/// The value of environment variable `name`, if set and not empty.
std::optional<std::string> environment(const char* name);

/// The integer in environment variable `name`, if set. Throws ConfigError naming variable and value if it is not one.
std::optional<int64_t> environment_integer(const char* name);

}  // namespace tessera
