#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace tessera {

/// The JSON object in `text`. Throws DataError, whose message continues "… is", if it is no JSON, no object, or has a key
/// twice in one object (of which parsers keep either).
nlohmann::json parse_json(std::string_view text);

}  // namespace tessera
