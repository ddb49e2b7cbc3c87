#pragma once

#include <string_view>

namespace tessera::models {

/// A stretch of text that a subword tokenizer may see, or one that it would change and that must go around it byte by byte.
struct TextSpan {
  std::string_view bytes;
  bool plain;
};

/// The longest plain span, in bytes. Sentencepiece ignores training sentences of more than 4,192.
inline constexpr size_t kLongestSpan = 4000;

/// The first span of a text that isn't empty. Plain is valid UTF-8 without line ends and other control characters and
/// without the two characters that sentencepiece uses for itself (U+2581 for a space, U+2585 for an unknown character). A
/// plain span ends before what is not plain or, if that comes late, before the last space or character that keeps it within
/// kLongestSpan.
TextSpan first_span(std::string_view text);

}  // namespace tessera::models
