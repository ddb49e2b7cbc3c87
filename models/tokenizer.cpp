#include "models/tokenizer.h"

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {
namespace {

constexpr int64_t kBytes = 256;

class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> tokens(text.size());
    for (size_t i = 0; i < text.size(); ++i) tokens[i] = static_cast<unsigned char>(text[i]);
    return tokens;
  }

  std::string decode(std::span<const int32_t> tokens) const override {
    std::string text(tokens.size(), '\0');
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < 0 || tokens[i] >= kBytes)
        throw DataError(tessera::text("token ", tokens[i], " is no byte; bytes are 0 to 255"));
      text[i] = static_cast<char>(tokens[i]);
    }
    return text;
  }

  int64_t vocabulary() const override { return kBytes; }
};

}  // namespace

std::shared_ptr<const Tokenizer> byte_tokenizer() { return std::make_shared<ByteTokenizer>(); }

std::shared_ptr<const Tokenizer> open_tokenizer(int64_t vocabulary, std::string_view text,
                                                const std::filesystem::path& directory, Vocabulary kind) {
  if (vocabulary < kBytes)
    throw ConfigError(tessera::text(
        "option vocab must be 256 (each byte is a token) or more (a tokenizer learns the others from the text), but is ",
        vocabulary));
  if (vocabulary == kBytes) return byte_tokenizer();
  const auto file = directory.empty() ? directory : directory / "tokenizer.model";
  if (!file.empty() && std::filesystem::exists(file)) {
    auto kept = load_tokenizer(file);
    if (kept->vocabulary() == vocabulary) return kept;
  }
  return train_tokenizer(vocabulary, text, kind, file);
}

}  // namespace tessera::models
