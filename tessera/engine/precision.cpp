#include "tessera/engine/precision.h"

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

Element element_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return Element::float32;
    case c10::ScalarType::Double:
      return Element::float64;
    case c10::ScalarType::BFloat16:
      return Element::bfloat16;
    case c10::ScalarType::Half:
      return Element::float16;
    default:
      throw ConfigError(
          text("parameters of type ", c10::toString(type), " can't be trained; use float32, float64, bfloat16 or float16"));
  }
}

}  // namespace tessera
