#pragma once

#include <filesystem>
#include <set>
#include <span>
#include <string>

#include "cli/train_option_table.h"

namespace tessera::cli {

/// Reads a TOML file whose keys are names of options, with dashes or underscores, into the options' targets; returns the
/// names of those that it sets. Throws ConfigError with file and line for a syntax error, an unknown key (with the nearest
/// name), one given twice, or a value of the wrong type; DataError if the file can't be read.
std::set<std::string> read_config(const std::filesystem::path& file, std::span<const TrainOption> options);

}  // namespace tessera::cli
