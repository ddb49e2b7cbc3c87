#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tessera::cli {

/// What a demo showed, for a person. `results` holds docs/train_json.md's objects of its runs: "zero3" with validation and
/// sample, "ddp", and "compare" with difference.
std::string demo_report(const nlohmann::json& results);

}  // namespace tessera::cli
