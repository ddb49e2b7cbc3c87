#include "models/bigram.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {
namespace {

constexpr size_t kBytes = 256;

struct Pairs {
  explicit Pairs(std::string_view text) : count(kBytes * kBytes), first(kBytes) {
    for (size_t i = 0; i + 1 < text.size(); ++i) {
      const auto a = static_cast<unsigned char>(text[i]), b = static_cast<unsigned char>(text[i + 1]);
      ++count[a * kBytes + b];
      ++first[a];
    }
  }
  std::vector<int64_t> count;  // of each pair
  std::vector<int64_t> first;  // of each byte as a pair's first
};

double nats_per_byte(const Pairs& training, const Pairs& validation, double alpha) {
  double nats = 0, bytes = 0;
  for (size_t pair = 0; pair < kBytes * kBytes; ++pair) {
    if (validation.count[pair] == 0) continue;
    const double probability = (static_cast<double>(training.count[pair]) + alpha) /
                               (static_cast<double>(training.first[pair / kBytes]) + alpha * static_cast<double>(kBytes));
    nats -= static_cast<double>(validation.count[pair]) * std::log(probability);
    bytes += static_cast<double>(validation.count[pair]);
  }
  return nats / bytes;
}

}  // namespace

BigramBaseline bigram_baseline(std::string_view training, std::string_view validation) {
  if (validation.size() < 2)
    throw DataError(text("a bigram model needs 2 bytes of validation text, but there are ", validation.size()));
  const Pairs trained(training), asked(validation);
  BigramBaseline best{std::numeric_limits<double>::infinity(), 0};
  for (int exponent = -32; exponent <= 8; ++exponent) {
    const double alpha = std::pow(10.0, exponent / 8.0);
    if (const double nats = nats_per_byte(trained, asked, alpha); nats < best.nats_per_byte) best = {nats, alpha};
  }
  return best;
}

}  // namespace tessera::models
