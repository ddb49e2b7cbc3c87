#pragma once

#include <string_view>

namespace tessera::models {

/// What a table of byte pairs can predict: the bar that a trained model has to pass.
struct BigramBaseline {
  double nats_per_byte;  ///< mean cross entropy of a validation byte, given the byte before it
  double alpha;          ///< the smoothing that gave it
};

/// The best byte-level bigram model: P(b | a) = (count(a, b) + α) / (count(a) + 256 α), with counts from `training` and the
/// α of a grid (10⁻⁴ to 10, 8 a decade) that suits `validation` best. Choosing α there favours the bigram: no bigram of this
/// kind does better. Throws DataError if `validation` has fewer than two bytes. O(bytes + 65,536 · grid).
BigramBaseline bigram_baseline(std::string_view training, std::string_view validation);

}  // namespace tessera::models
