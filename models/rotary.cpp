#include "models/rotary.h"

#include <cmath>

namespace tessera::models {

torch::Tensor Rotary::make_table() const {
  auto table = torch::empty({2, context_, 1, head_size_}, torch::kFloat);
  auto* cosine = table.mutable_data_ptr<float>();
  auto* sine = cosine + context_ * head_size_;
  const int64_t half = head_size_ / 2;
  for (int64_t position = 0; position < context_; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(position) / std::pow(theta_, 2.0 * static_cast<double>(i) / static_cast<double>(head_size_));
      const int64_t at = position * head_size_ + i;
      cosine[at] = cosine[at + half] = static_cast<float>(std::cos(angle));
      sine[at + half] = static_cast<float>(std::sin(angle));
      sine[at] = -sine[at + half];
    }
  }
  return table;
}

Rotary::Rows Rotary::rows(int64_t length, const torch::Device& device) const {
  const std::lock_guard lock(mutex_);
  if (!table_.defined() || table_.device() != device) {
    // A table made under InferenceMode couldn't be saved for a later backward pass.
    const c10::InferenceMode no_inference(false);
    table_ = make_table().to(device);
  }
  return {table_[0].narrow(0, 0, length), table_[1].narrow(0, 0, length)};
}

torch::Tensor Rotary::Rows::rotate(const torch::Tensor& x) const {
  // Rolling by half a head puts each element's partner in its place: three operators, where two halves and a cat are seven.
  return torch::addcmul(x * cosine, x.roll(x.size(-1) / 2, -1), signed_sine).to(x.scalar_type());
}

}  // namespace tessera::models
