#pragma once

#include <nlohmann/json_fwd.hpp>

namespace tessera::cli {

/// What facts about a machine (see `examine_machine`) mean for training on it: a list of {"name", "mark", "text",
/// "needed_for", "advice", "required"} in the order to show them. "mark" is "ok", "note" (works, could be better) or
/// "missing"; "required" says that nothing works without it; "needed_for" and "advice" are "" where there is nothing to say.
/// Pure.
nlohmann::json judge(const nlohmann::json& facts);

}  // namespace tessera::cli
