#pragma once

#include <fnmatch.h>

#include <string>

namespace tessera {

/// Does `name` match `pattern`: `*` any characters (dots too), `?` one, `[…]` a set?
inline bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

}  // namespace tessera
