#pragma once

#include <string>

namespace tessera::cli {

enum class DemoSize { full, quick };

/// A call of `tessera demo`.
struct DemoCommand {
  DemoSize size = DemoSize::full;
  int ranks = 2;
  std::string data{};  ///< a text; empty: the one that the project ships
  std::string json{};  ///< where the result goes: a file, "-" for standard output, "" for nowhere
};

/// Trains a byte-level Llama on a text under zero3, then a few steps under ddp and a few of zero3 beside the unsharded run,
/// each as local ranks of this program with their progress on stderr. Prints what the model learned, the bytes that each
/// rank holds under both placements beside the formula's, how the numbers differ from the unsharded run's, and text that the
/// model made. Returns the exit status: that of the first run that failed. Leaves nothing behind but `json`, which holds
/// docs/train_json.md's objects of the three runs: {"zero3", "ddp", "compare"}. Throws ConfigError, and DataError if there
/// is no text.
int demo_command(const DemoCommand& command);

}  // namespace tessera::cli
