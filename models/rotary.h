#pragma once

#include <torch/torch.h>

#include <mutex>

namespace tessera::models {

/// Rotary position embedding (Su et al., "RoFormer", 2021, section 3.2), pairing element i with i + size/2 as Hugging Face's
/// Llama does. The tables are fp32, belong to no state dict and are no parameters: they follow from the three numbers.
class Rotary {
 public:
  /// For heads of `head_size` (even) elements and positions 0 … context − 1.
  Rotary(int64_t context, int64_t head_size, double theta) : context_(context), head_size_(head_size), theta_(theta) {}

  /// What rotates the first positions of a sequence. Both fp32 [length, 1, head_size], so that they broadcast over heads.
  struct Rows {
    torch::Tensor cosine;
    torch::Tensor signed_sine;  ///< the first half negated

    /// `x` [batch, length, heads, head_size], rotated, in x's dtype. Computed in fp32 where x is narrower.
    torch::Tensor rotate(const torch::Tensor& x) const;
  };

  /// The rows for positions 0 … length − 1 (length ≤ context) on `device`. The first call on a device makes the tables.
  Rows rows(int64_t length, const torch::Device& device) const;

 private:
  torch::Tensor make_table() const;

  int64_t context_;
  int64_t head_size_;
  double theta_;
  mutable std::mutex mutex_;
  mutable torch::Tensor table_;  // [2, context, 1, head_size]: cosine and signed sine
};

}  // namespace tessera::models
