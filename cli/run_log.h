#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>

#include "tessera/base/descriptor.h"

namespace tessera::cli {

/// A run's log: one JSON object a line. Each line is whole or absent, also when the disk is full.
class RunLog {
 public:
  /// Creates `directory` if needed and continues `directory`/log.jsonl. Throws SystemError naming the file.
  explicit RunLog(const std::filesystem::path& directory);

  /// Appends a line. Throws SystemError naming the file and the reason; the file then ends with the line before.
  void write(const nlohmann::json& line);

 private:
  std::filesystem::path file_;
  Descriptor descriptor_;
};

}  // namespace tessera::cli
