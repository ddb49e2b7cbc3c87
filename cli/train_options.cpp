#include "cli/train_options.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

#include "cli/output.h"
#include "tessera/base/error.h"
#include "tessera/base/suggest.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

constexpr int64_t kMostRanks = 1024;
// With these the counts of parameters and of tokens a step fit 64 bits.
constexpr int64_t kMostLayers = 10'000;
constexpr int64_t kLargestSize = 1 << 20;
constexpr int64_t kLargestVocabulary = 1 << 24;
constexpr int64_t kLargestBatch = 1 << 16;
constexpr int64_t kMostSteps = int64_t{1} << 40;
constexpr double kLargest = std::numeric_limits<double>::max();

template <class Number>
void require(const char* option, Number value, bool good, const std::string& wanted) {
  if (!good) throw ConfigError(text("option ", option, " must be ", wanted, ", but is ", value));
}

void require_whole(const char* option, int64_t value, int64_t least, int64_t most) {
  require(option, value, value >= least && value <= most, text("a whole number from ", least, " to ", most));
}

void require_least(const char* option, double value, double least) {
  require(option, value, value >= least && value <= kLargest, text("a finite number, at least ", least));
}

void require_part(const char* option, double value) {
  require(option, value, value >= 0 && value <= 1, "a number from 0 to 1");
}

void require_below_one(const char* option, double value) {
  require(option, value, value >= 0 && value < 1, "a number from 0 to less than 1");
}

void require_choice(const char* option, const std::string& value, const std::vector<std::string>& choices) {
  std::string list;
  for (const auto& choice : choices) {
    if (value == choice) return;
    list += text(list.empty() ? "" : ", ", choice.empty() ? "empty" : choice);
  }
  throw ConfigError(
      text("option ", option, " must be one of ", list, ", but is '", value, "'", did_you_mean(value, choices)));
}

void check_model(models::LlamaConfig& model) {
  if (model.kv_heads == 0) model.kv_heads = model.heads;
  require_whole("layers", model.layers, 1, kMostLayers);
  require_whole("width", model.width, 1, kLargestSize);
  require_whole("hidden", model.hidden, 1, kLargestSize);
  require_whole("vocab", model.vocab, 1, kLargestVocabulary);
  require_whole("context", model.context, 1, kLargestSize);
  require_whole("kv-heads", model.kv_heads, 0, kLargestSize);
  model.validate();
}

void check_steps(const TrainOptions& options) {
  require_whole("batch", options.batch, 1, kLargestBatch);
  require_whole("accumulate", options.accumulate, 1, kLargestBatch);
  require_whole("steps", options.steps, 1, kMostSteps);
  require_whole("seed", options.seed, 0, std::numeric_limits<int64_t>::max());
  require_whole("validate-every", options.validate_every, 0, kMostSteps);
  require_whole("validation-samples", options.validation_samples, 1, kMostSteps);
  require_whole("sample", options.sample, 0, kLargestSize);
}

void check_optimizer(const TrainOptions& options) {
  require_least("lr", options.lr, 0);
  require_whole("warmup", options.warmup, 0, kMostSteps);
  require_part("min-lr", options.min_lr);
  require_below_one("beta1", options.beta1);
  require_below_one("beta2", options.beta2);
  require("eps", options.eps, options.eps > 0 && options.eps <= kLargest, "a finite number above 0");
  require_least("weight-decay", options.weight_decay, 0);
  require_least("clip", options.clip, 0);
  require_choice("non-finite", options.non_finite, {"stop", "skip"});
}

}  // namespace

int64_t blocks_a_unit(const TrainOptions& options) {
  if (options.units == "block") return 1;
  int64_t blocks = 0;
  const char* end = options.units.data() + options.units.size();
  const auto [rest, error] = std::from_chars(options.units.data(), end, blocks);
  return error == std::errc{} && rest == end && blocks > 0 ? blocks : 0;
}

namespace {

void check_sharding(const TrainOptions& options) {
  require_whole("ranks", options.ranks, 1, kMostRanks);
  require_choice("placement", options.placement, {"ddp", "zero1", "zero2", "zero3"});
  if (options.units != "model" && blocks_a_unit(options) == 0)
    throw ConfigError(text("option units must be block, model or a number of blocks from 1, but is '", options.units, "'",
                           did_you_mean(options.units, std::vector<std::string>{"block", "model"})));
  require_choice("kept", options.kept, {"nothing", "root", "all"});
  require_choice("dtype", options.dtype, {"fp32", "bf16"});
  require_choice("compare", options.compare, {"", "unsharded"});
  require_whole("threads-per-rank", options.threads_per_rank, 0, 1024);
  require_whole("timeout-ms", options.timeout_ms, 1, std::numeric_limits<int>::max());
}

[[noreturn]] void refuse_data(const TrainOptions& options, const std::string& what) {
  throw DataError(
      text("option data: file '", options.data, "' ", what, "; give a text file, or 'random' for synthetic tokens"));
}

void check_text_file(const TrainOptions& options) {
  std::error_code error;
  const auto status = std::filesystem::status(options.data, error);
  if (!std::filesystem::exists(status))
    refuse_data(options, text("can't be opened: ", error ? error.message() : "it does not exist"));
  if (std::filesystem::is_directory(status)) refuse_data(options, "is a directory");
  if (!std::filesystem::is_regular_file(status)) refuse_data(options, "is not a regular file");
  if (::access(options.data.c_str(), R_OK) != 0) refuse_data(options, text("can't be read: ", std::strerror(errno)));
  if (std::filesystem::file_size(options.data, error) == 0) refuse_data(options, "is empty");
}

void check_data(const TrainOptions& options) {
  if (options.data == "random") {
    const auto require_text = [](bool unused, const char* option) {
      if (!unused)
        throw ConfigError(text("option ", option, " needs a text: name a file with option data, which is 'random'"));
    };
    require_text(options.sample == 0, "sample");
    require_text(options.validate_every == 0, "validate-every");
    return;
  }
  require("vocab", options.model.vocab, options.model.vocab >= 256, "at least 256 for a text, one token for each byte");
  check_text_file(options);
}

void check_output(const TrainOptions& options) {
  if (!options.json.empty()) check_json_destination(options.json);
  if (options.run_directory.empty()) return;
  std::error_code error;
  if (std::filesystem::exists(options.run_directory, error) && !std::filesystem::is_directory(options.run_directory, error))
    throw ConfigError(text("option run-directory names '", options.run_directory, "', which is not a directory"));
  check_can_be_made("run-directory", options.run_directory + "/log.jsonl");
}

}  // namespace

void validate(TrainOptions& options) {
  check_model(options.model);
  check_steps(options);
  check_optimizer(options);
  check_sharding(options);
  check_data(options);
  check_output(options);
}

}  // namespace tessera::cli
