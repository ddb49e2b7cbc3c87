#include "models/text_spans.h"

#include <algorithm>
#include <cstdint>

namespace tessera::models {
namespace {

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

/// Bytes of the UTF-8 character (Unicode 15, table 3-7) at the start of `text`; 0 if there is none.
size_t character_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xc2 && lead <= 0xdf   ? 2
                        : lead >= 0xe0 && lead <= 0xef ? 3
                        : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                       : 0;
  if (length == 0 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i)
    if (!is_continuation(text[i])) return 0;
  if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90)) return 0;  // could be written shorter
  if ((lead == 0xed && byte(1) > 0x9f) || (lead == 0xf4 && byte(1) > 0x8f)) return 0;  // surrogates, and beyond U+10FFFF
  return length;
}

/// Bytes of the plain character at the start of `text`; 0 if what is there isn't plain.
size_t plain_length(std::string_view text) {
  const size_t length = character_length(text);
  if (length == 1 && (static_cast<unsigned char>(text[0]) < 0x20 || text[0] == 0x7f)) return 0;
  const auto character = text.substr(0, length);
  return character == "\u2581" || character == "\u2585" ? 0 : length;
}

}  // namespace

TextSpan first_span(std::string_view text) {
  size_t end = 0, last_space = 0;
  while (end < text.size()) {
    const size_t length = plain_length(text.substr(end));
    if (length == 0) break;
    if (end + length > kLongestSpan) return {text.substr(0, last_space > 0 ? last_space : end), true};
    if (text[end] == ' ') last_space = end;
    end += length;
  }
  if (end > 0) return {text.substr(0, end), true};
  return {text.substr(0, std::max<size_t>(character_length(text), 1)), false};
}

}  // namespace tessera::models
