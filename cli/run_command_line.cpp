#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/command_line.h"
#include "cli/doctor_command.h"
#include "cli/launch_command.h"
#include "cli/output.h"

namespace tessera::cli {
namespace {

int run(const HelpCommand& command) {
  print(command.text);
  return 0;
}

int run(const TrainCommand& command) { return train_command(command); }

int run(const LaunchCommand& command) {
  if (command.json.empty()) return launch(command.options);
  check_json_destination(command.json);
  const LaunchResult result = run_ranks(command.options);
  std::fputs(explain(result).c_str(), stderr);
  write_json(command.json, to_json(result));
  return result.status;
}

int run(const DoctorCommand& command) {
  if (!command.json.empty()) check_json_destination(command.json);
  const nlohmann::json examination = examine_machine();
  if (command.json != "-") print(describe(examination));
  if (!command.json.empty()) write_json(command.json, examination);
  return exit_status(examination);
}

int run(const DemoCommand& command) { return demo_command(command); }

}  // namespace

int run_command_line(const std::vector<std::string>& arguments) {
  return std::visit([](const auto& command) { return run(command); }, parse_command_line(arguments));
}

}  // namespace tessera::cli
