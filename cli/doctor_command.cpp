#include "cli/doctor_command.h"

#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/doctor_findings.h"
#include "cli/libtorch_probe.h"
#include "cli/machine_calls.h"
#include "cli/machine_files.h"

namespace tessera::cli {

using nlohmann::json;

json examine_machine(const std::filesystem::path& root) {
  json all{{"libtorch", probe_libtorch()}, {"cpu", read_cpu(root)},
           {"memory", read_memory(root)},  {"huge_pages", read_huge_pages(root)},
           {"kernel", read_kernel(root)},  {"system_calls", try_system_calls()},
           {"dev_shm", try_dev_shm()},     {"limits", read_limits()}};
  json findings = judge(all);
  const auto blocks = [](const json& finding) { return finding["mark"] == "missing" && finding["required"]; };
  all["ok"] = std::none_of(findings.begin(), findings.end(), blocks);
  all["findings"] = std::move(findings);
  return all;
}

std::string describe(const json& examination) {
  std::ostringstream lines, hints;
  for (const auto& finding : examination["findings"]) {
    const std::string name = finding["name"], mark = finding["mark"], needed_for = finding["needed_for"],
                      advice = finding["advice"];
    lines << std::left << std::setw(9) << mark << std::setw(22) << name << finding["text"].get<std::string>() << '\n';
    if (mark == "ok") continue;
    hints << "  " << std::setw(22) << std::left << name << (finding["required"] ? "required for " : "for ") << needed_for;
    if (!advice.empty()) hints << '\n' << std::string(24, ' ') << advice;
    hints << '\n';
  }
  if (!hints.str().empty()) lines << "\nWhat is missing, or could be better, for what:\n" << hints.str();
  lines << (examination["ok"] ? "\nEverything that Tessera requires is here.\n"
                              : "\nTessera can't train here until the required is there.\n");
  return lines.str();
}

int exit_status(const json& examination) { return examination["ok"] ? 0 : 1; }

}  // namespace tessera::cli
