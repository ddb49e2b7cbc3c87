#include "tessera/checkpoint/json_file.h"

#include <set>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

nlohmann::json parse_json(std::string_view text_) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the objects around
  std::string twice;
  bool found = false;
  const auto look = [&](int, Event event, nlohmann::json& value) {
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second && !found) {
      twice = value.get<std::string>();
      found = true;
    }
    return true;
  };
  nlohmann::json all;
  try {
    all = nlohmann::json::parse(text_, look);
  } catch (const nlohmann::json::exception& error) {
    throw DataError(text("no JSON (", error.what(), ")"));
  }
  if (found) throw DataError(text("ambiguous: it has the name '", twice, "' twice"));
  if (!all.is_object()) throw DataError("no JSON object");
  return all;
}

}  // namespace tessera
