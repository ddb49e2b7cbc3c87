#include "models/llama_config.h"

#include <cmath>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {
namespace {

void require_positive(const char* option, int64_t value) {
  if (value < 1) throw ConfigError(text("option ", option, " must be at least 1, but is ", value));
}

void require_divides(const char* option, int64_t divisor, const char* of, int64_t value) {
  if (value % divisor == 0) return;
  int64_t below = divisor;
  while (value % below != 0) --below;
  throw ConfigError(text("option ", option, " must divide ", of, " (", value, "), but is ", divisor, "; try ", below));
}

}  // namespace

void LlamaConfig::validate() const {
  for (const auto& [option, value] : {std::pair{"layers", layers},
                                      {"width", width},
                                      {"heads", heads},
                                      {"kv-heads", kv_heads},
                                      {"hidden", hidden},
                                      {"vocab", vocab},
                                      {"context", context}})
    require_positive(option, value);
  require_divides("heads", heads, "width", width);
  require_divides("kv-heads", kv_heads, "heads", heads);
  if (head_size() % 2 != 0)
    throw ConfigError(text("options width (", width, ") and heads (", heads, ") give heads of ", head_size(),
                           " elements; rotary embedding turns pairs and needs an even number: change width or heads"));
  if (!(rope_theta > 0) || !std::isfinite(rope_theta))
    throw ConfigError(text("option rope-theta must be a positive number, but is ", rope_theta));
  if (!(norm_eps > 0) || !std::isfinite(norm_eps))
    throw ConfigError(text("option norm-eps must be a positive number, but is ", norm_eps));
}

int64_t LlamaConfig::parameters() const {
  const int64_t attention = 2 * width * width + 2 * width * kv_heads * head_size();
  const int64_t feed_forward = 3 * width * hidden;
  const int64_t norms = 2 * width;
  return layers * (attention + feed_forward + norms) + width + vocab * width * (tied ? 1 : 2);
}

}  // namespace tessera::models
