#pragma once

#include "models/token_source.h"

namespace tessera::models {

/// Samples made up from a seed, for timing and for tests: in each, tokens advance by a stride of 1 to 7, give or take a
/// random bit, from a random first token, modulo the vocabulary. So there is something to learn, and a loss can fall. Needs
/// no file and no memory.
class SyntheticData final : public TokenSource {
 public:
  /// Throws ConfigError for a vocabulary below 2.
  SyntheticData(int64_t vocabulary, int64_t context, uint64_t seed);

  int64_t validation_samples() const override { return 256; }
  int64_t vocabulary() const override { return vocabulary_; }

 protected:
  void write_training_sample(uint64_t index, int64_t* tokens) const override;
  void write_validation_sample(int64_t index, int64_t* tokens) const override;

 private:
  void write(uint64_t stream, uint64_t index, int64_t* tokens) const;

  int64_t vocabulary_;
  uint64_t seed_;
};

}  // namespace tessera::models
