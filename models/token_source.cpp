#include "models/token_source.h"

#include <ATen/ops/empty.h>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {

TokenSource::TokenSource(int64_t context) : context_(context) {
  if (context < 1) throw ConfigError(text("option context must be at least 1, but is ", context));
}

at::Tensor TokenSource::batch(int64_t step, Rank rank, int ranks, int64_t batch_per_rank) const {
  if (step < 0) throw ConfigError(text("batches are counted from 0, but step is ", step));
  if (batch_per_rank < 1) throw ConfigError(text("option batch must be at least 1, but is ", batch_per_rank));
  if (rank.value < 0 || rank.value >= ranks) throw ConfigError(text("rank ", rank.value, " is none of ", ranks, " ranks"));
  auto tokens = at::empty({batch_per_rank, context_ + 1}, at::kLong);
  const auto first = static_cast<uint64_t>((step * ranks + rank.value) * batch_per_rank);
  for (int64_t i = 0; i < batch_per_rank; ++i)
    write_training_sample(first + static_cast<uint64_t>(i), tokens.mutable_data_ptr<int64_t>() + i * (context_ + 1));
  return tokens;
}

at::Tensor TokenSource::validation_batch(int64_t first, int64_t count) const {
  if (first < 0 || count < 1 || count > validation_samples() - first)
    throw ConfigError(text("validation samples ", first, " to ", first + count - 1, " were asked for, but there are ",
                           validation_samples()));
  auto tokens = at::empty({count, context_ + 1}, at::kLong);
  for (int64_t i = 0; i < count; ++i)
    write_validation_sample(first + i, tokens.mutable_data_ptr<int64_t>() + i * (context_ + 1));
  return tokens;
}

}  // namespace tessera::models
