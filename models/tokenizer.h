#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::models {

/// Text to token numbers and back, without loss: decode(encode(text)) == text for any bytes. Immutable, so safe from many
/// threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// The tokens of `text`, each in 0 … vocabulary() − 1. About linear in its length.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;

  /// The bytes that `tokens` stand for. Part of a character's bytes come out as they are. Throws DataError for a number that
  /// is no token.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;

  virtual int64_t vocabulary() const = 0;  ///< number of tokens
};

/// How a tokenizer of more than 256 tokens learns its vocabulary.
enum class Vocabulary { kBytePair, kUnigram };

/// One token for each byte: a vocabulary of 256.
std::shared_ptr<const Tokenizer> byte_tokenizer();

/// Learns `vocabulary` (more than 256) tokens from `text` with sentencepiece. Each of the 256 bytes is a token too, which is
/// what makes any text representable. Deterministic. Texts of more than 16 MiB are sampled evenly. Throws ConfigError if the
/// text supports no such vocabulary, with the nearest size that works, and DataError if it has nothing but control
/// characters. `model_file`, if not empty, receives the model: it is written beside and renamed, so that it's whole or
/// absent.
std::shared_ptr<const Tokenizer> train_tokenizer(int64_t vocabulary, std::string_view text, Vocabulary kind,
                                                 const std::filesystem::path& model_file = {});

/// Reads a tokenizer that train_tokenizer wrote. Throws DataError, naming the file, if it is missing, damaged or not of that
/// kind.
std::shared_ptr<const Tokenizer> load_tokenizer(const std::filesystem::path& model_file);

/// What a run uses: bytes for a `vocabulary` of 256; otherwise `directory`/tokenizer.model if it is there and has that
/// vocabulary, else one trained on `text` and kept there. An empty `directory` keeps nothing. Throws ConfigError for a
/// vocabulary below 256 and as train_tokenizer does.
std::shared_ptr<const Tokenizer> open_tokenizer(int64_t vocabulary, std::string_view text,
                                                const std::filesystem::path& directory,
                                                Vocabulary kind = Vocabulary::kBytePair);

}  // namespace tessera::models
