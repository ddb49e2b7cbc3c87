#include "models/synthetic_data.h"

#include "models/counter_random.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {

SyntheticData::SyntheticData(int64_t vocabulary, int64_t context, uint64_t seed)
    : TokenSource(context), vocabulary_(vocabulary), seed_(seed) {
  if (vocabulary < 2) throw ConfigError(text("option vocab must be at least 2, but is ", vocabulary));
}

void SyntheticData::write(uint64_t stream, uint64_t index, int64_t* tokens) const {
  const uint64_t sample = counter_random(seed_, stream, index);
  const int64_t start = scale_to(mix(sample), vocabulary_);
  const int64_t stride = 1 + scale_to(mix(sample + 1), 7);
  for (int64_t i = 0; i <= context(); ++i) {
    const auto noise = static_cast<int64_t>(counter_random(sample, /*stream=*/0, static_cast<uint64_t>(i)) & 1);
    tokens[i] = (start + stride * i + noise) % vocabulary_;
  }
}

void SyntheticData::write_training_sample(uint64_t index, int64_t* tokens) const { write(/*stream=*/0, index, tokens); }

void SyntheticData::write_validation_sample(int64_t index, int64_t* tokens) const {
  write(/*stream=*/1, static_cast<uint64_t>(index), tokens);
}

}  // namespace tessera::models
