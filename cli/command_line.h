#pragma once

#include <string>
#include <variant>
#include <vector>

#include "cli/demo_command.h"
#include "cli/launcher.h"
#include "cli/train_command.h"

namespace tessera::cli {

struct HelpCommand {
  std::string text;  ///< to print
};

struct LaunchCommand {
  LaunchOptions options;
  std::string json;  ///< where what happened goes: a file, "-" for standard output, "" for nowhere
};

struct DoctorCommand {
  std::string json;  ///< as above; "-" takes the place of the text
};

using Command = std::variant<HelpCommand, TrainCommand, LaunchCommand, DoctorCommand, DemoCommand>;

/// What a command line means; `arguments` without the program's name. Throws ConfigError for what can't be meant: an unknown
/// command or option (with the nearest name), one without its value or given twice, a value of the wrong kind, and for a
/// configuration file as `read_config` does. What options mean together is checked when the command runs.
Command parse_command_line(const std::vector<std::string>& arguments);

/// Does what `arguments` say and returns the exit status. Throws as `parse_command_line` and the commands do.
int run_command_line(const std::vector<std::string>& arguments);

}  // namespace tessera::cli
