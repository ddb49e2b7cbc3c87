#pragma once

#include <fnmatch.h>

#include <string>

namespace tessera {

/// Does `name` match `pattern`? `*` is any characters (dots too), `?` one, `[…]` one of a set, `@(a|b)` one of several
/// patterns.
inline bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), FNM_EXTMATCH) == 0;
}

}  // namespace tessera
