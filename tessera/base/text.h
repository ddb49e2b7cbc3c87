#pragma once

#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Its arguments one after another, as an output stream would print them.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

/// The parts of `all` between separators, one more than there are separators.
inline std::vector<std::string> split(std::string_view all, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = all.find(separator, begin)) != std::string_view::npos; begin = end + 1)
    parts.emplace_back(all.substr(begin, end - begin));
  parts.emplace_back(all.substr(begin));
  return parts;
}

/// "[5, 3]"
inline std::string words_of_shape(std::span<const int64_t> shape) {
  std::string words = "[";
  for (const int64_t size : shape) words += text(words.size() > 1 ? ", " : "", size);
  return words + "]";
}

}  // namespace tessera
