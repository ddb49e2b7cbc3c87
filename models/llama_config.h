#pragma once

#include <cstdint>

namespace tessera::models {

/// The shape of a Llama-style decoder. All sizes are counts of elements, heads, layers or tokens.
struct LlamaConfig {
  int64_t layers = 8;
  int64_t width = 768;    ///< elements of the residual stream
  int64_t heads = 12;     ///< query heads; each has `width / heads` elements
  int64_t kv_heads = 12;  ///< key and value heads, each shared by `heads / kv_heads` query heads
  int64_t hidden = 2048;  ///< elements of the feed-forward's inner layer
  int64_t vocab = 8192;   ///< tokens known to the embedding and the output head
  int64_t context = 64;   ///< longest sequence, in tokens
  double rope_theta = 10000.0;
  double norm_eps = 1e-5;
  bool tied = false;  ///< the output head is the embedding's matrix

  int64_t head_size() const { return width / heads; }

  /// Throws ConfigError, naming the option, its value and what is wanted, if no model can have this shape.
  void validate() const;

  /// Elements of all parameters; those of a tied matrix count once. O(1).
  int64_t parameters() const;
};

}  // namespace tessera::models
