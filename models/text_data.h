#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "models/token_source.h"
#include "models/tokenizer.h"

namespace tessera::models {

/// Samples from a text: its last tenth (from the next line on) is held out for validation, the rest is for training.
///
/// Training sample i starts at token mix(mix(mix(seed)) ^ i) scaled to the number of possible starts, where mix is
/// SplitMix64's (see counter_random.h): every offset is equally likely, with replacement. Validation samples follow one
/// another and share one token, so that each token but the first is predicted once. Holds the text and 4 bytes a token in
/// memory.
class TextData final : public TokenSource {
 public:
  /// `name` is what messages call the text. Throws DataError, with both numbers, if training or validation part is shorter
  /// than a sample.
  TextData(const std::string& name, std::string text, std::shared_ptr<const Tokenizer> tokenizer, int64_t context,
           uint64_t seed);

  /// Reads `file` and tokenizes it: by bytes for a `vocabulary` of 256, else by a tokenizer kept in `directory` or trained
  /// on the training part (see open_tokenizer). Throws DataError for a file that can't be used and ConfigError for a
  /// vocabulary that it can't support.
  static std::unique_ptr<TextData> load(const std::filesystem::path& file, int64_t vocabulary,
                                        const std::filesystem::path& directory, int64_t context, uint64_t seed,
                                        Vocabulary kind = Vocabulary::kBytePair);

  int64_t validation_samples() const override;
  int64_t vocabulary() const override { return tokenizer_->vocabulary(); }
  const Tokenizer& tokenizer() const { return *tokenizer_; }

  std::string_view training_text() const { return std::string_view(text_).substr(0, split_); }
  std::string_view validation_text() const { return std::string_view(text_).substr(split_); }

  /// Mean bytes of a validation token. A validation loss in nats per token, divided by this, is in nats per byte: a number
  /// that does not depend on the vocabulary.
  double bytes_per_token() const;

 protected:
  void write_training_sample(uint64_t index, int64_t* tokens) const override;
  void write_validation_sample(int64_t index, int64_t* tokens) const override;

 private:
  std::string text_;
  size_t split_;  // where validation begins, in bytes
  std::shared_ptr<const Tokenizer> tokenizer_;
  uint64_t seed_;
  std::vector<int32_t> training_;
  std::vector<int32_t> validation_;
};

}  // namespace tessera::models
