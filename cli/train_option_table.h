#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cli/train_options.h"

namespace tessera::cli {

/// One option of `tessera train`: what it is called, on the command line and in a configuration file, and where its value
/// goes.
struct TrainOption {
  std::string name;  ///< with dashes between words and none before: "kv-heads"
  std::variant<bool*, int*, int64_t*, double*, std::string*> target;
  std::string group;  ///< the heading under which help lists it
  std::string value;  ///< what its value is called there: "N"; empty for a switch
  std::string help;
};

/// All of them, in the order to list them, with targets in `options`, which must outlive the table.
std::vector<TrainOption> train_option_table(TrainOptions& options);

/// Gives the option's target the value that `word` says; a switch wants "true" or "false". Throws ConfigError with the
/// option's name, what is wanted and what was got.
void assign(const TrainOption& option, std::string_view word);

/// What the option's values are: "a whole number", "a number", "true or false", "a string".
std::string kind_of(const TrainOption& option);

/// The present value, as it would be written; empty for an empty string and for a switch.
std::string value_of(const TrainOption& option);

}  // namespace tessera::cli
