#include "tessera/base/environment.h"

#include <charconv>
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<int64_t> environment_integer(const char* name) {
  const auto value = environment(name);
  if (!value) return std::nullopt;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
  if (error != std::errc() || end != value->data() + value->size())
    throw ConfigError(text("environment variable ", name, " must be an integer, but is '", *value, "'"));
  return number;
}

}  // namespace tessera
