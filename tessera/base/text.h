#pragma once

#include <sstream>
#include <string>

namespace tessera {

/// Its arguments one after another, as an output stream would print them.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace tessera
