#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace tessera::cli {

/// What `train` returned on rank 0 (docs/train_json.md), for a person: losses, speed, bytes per rank by role beside the
/// formula's, communication, and whatever else is there: validation, differences, schedule, generated text. Ends with a line
/// end.
std::string summary_text(const nlohmann::json& result);

/// Rows for `table`: bytes of parameters, gradients, optimizer state, their sum, padding and buffers, for each rank as
/// measured, then as the formula has them. `label` begins the name of each row.
std::vector<std::vector<std::string>> state_rows(const nlohmann::json& result, const std::string& label);

/// The heading of those rows.
std::vector<std::string> state_heading();

}  // namespace tessera::cli
