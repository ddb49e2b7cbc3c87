#include "cli/train_option_table.h"

#include <charconv>
#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

[[noreturn]] void refuse(const TrainOption& option, std::string_view word) {
  throw ConfigError(text("option ", option.name, " wants ", kind_of(option), ", but got '", word, "'"));
}

template <class Number>
Number number(const TrainOption& option, std::string_view word) {
  Number value{};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error == std::errc::result_out_of_range)
    throw ConfigError(text("option ", option.name, ": ", word, " is out of range"));
  if (error != std::errc() || end != word.data() + word.size()) refuse(option, word);
  return value;
}

std::vector<TrainOption> model_options(TrainOptions& o) {
  const std::string group = "Model";
  return {
      {"layers", &o.model.layers, group, "N", "transformer blocks"},
      {"width", &o.model.width, group, "N", "elements of the residual stream"},
      {"heads", &o.model.heads, group, "N", "attention heads; must divide the width"},
      {"kv-heads", &o.model.kv_heads, group, "N", "key and value heads; 0: as many as heads"},
      {"hidden", &o.model.hidden, group, "N", "elements of the feed-forward's inner layer"},
      {"vocab", &o.model.vocab, group, "N", "tokens; 256 reads bytes, more trains a tokenizer on the text first"},
      {"context", &o.model.context, group, "N", "tokens of a sample"},
  };
}

std::vector<TrainOption> data_options(TrainOptions& o) {
  const std::string group = "Data and steps";
  return {
      {"data", &o.data, group, "FILE", "a text file, or random: synthetic tokens"},
      {"batch", &o.batch, group, "N", "samples a rank and micro-batch"},
      {"accumulate", &o.accumulate, group, "N", "micro-batches a step"},
      {"steps", &o.steps, group, "N", "optimizer steps"},
      {"seed", &o.seed, group, "N", "of initial values, samples and generated text"},
      {"validate-every", &o.validate_every, group, "STEPS", "steps between validations; 0: only at the end"},
      {"validation-samples", &o.validation_samples, group, "N", "at most so many samples a validation"},
      {"sample", &o.sample, group, "TOKENS", "generate so much text at the end"},
  };
}

std::vector<TrainOption> optimizer_options(TrainOptions& o) {
  const std::string group = "Optimizer (AdamW)";
  return {
      {"lr", &o.lr, group, "RATE", "learning rate"},
      {"warmup", &o.warmup, group, "STEPS", "over which the learning rate rises; then it falls along a cosine"},
      {"min-lr", &o.min_lr, group, "PART", "of lr that is left at the end; 1: constant"},
      {"beta1", &o.beta1, group, "X", "decay of the first moment"},
      {"beta2", &o.beta2, group, "X", "decay of the second moment"},
      {"eps", &o.eps, group, "X", "added to the root of the second moment"},
      {"weight-decay", &o.weight_decay, group, "X", "decoupled weight decay"},
      {"clip", &o.clip, group, "NORM", "global gradient norm to clip to; 0: none"},
      {"non-finite", &o.non_finite, group, "POLICY",
       "at a loss or gradient that is no finite number: stop, or skip the step"},
  };
}

std::vector<TrainOption> sharding_options(TrainOptions& o) {
  const std::string group = "Sharding";
  return {
      {"ranks", &o.ranks, group, "N", "local processes to start; under a launcher, what the launcher says"},
      {"placement", &o.placement, group, "NAME", "ddp, zero1, zero2 or zero3"},
      {"units", &o.units, group, "WHAT", "what is gathered together: block, a number of blocks, or model"},
      {"kept", &o.kept, group, "WHAT", "what stays gathered from forward to backward: nothing, root or all"},
      {"dtype", &o.dtype, group, "TYPE", "of the working parameters: fp32 or bf16"},
      {"threads-per-rank", &o.threads_per_rank, group, "N", "0: OMP_NUM_THREADS, or cores / ranks if that isn't set"},
      {"timeout-ms", &o.timeout_ms, group, "MS", "how long a rank waits for another"},
      {"compare", &o.compare, group, "WITH",
       "unsharded: run the same steps without sharding too, and say how the numbers differ"},
  };
}

std::vector<TrainOption> output_options(TrainOptions& o) {
  const std::string group = "Output";
  return {
      {"run-directory", &o.run_directory, group, "DIR", "where tokenizer.model and log.jsonl go; default: nowhere"},
      {"json", &o.json, group, "FILE",
       "where the result goes as JSON (docs/train_json.md); without FILE or with -: standard output"},
      {"schedule", &o.schedule, group, "", "print the recorded order of gathers, releases and reductions"},
  };
}

}  // namespace

std::vector<TrainOption> train_option_table(TrainOptions& options) {
  std::vector<TrainOption> table;
  for (const auto& part : {model_options(options), data_options(options), optimizer_options(options),
                           sharding_options(options), output_options(options)})
    table.insert(table.end(), part.begin(), part.end());
  return table;
}

void assign(const TrainOption& option, std::string_view word) {
  const auto store = [&](auto* target) {
    using Value = std::remove_pointer_t<decltype(target)>;
    if constexpr (std::is_same_v<Value, std::string>) {
      *target = word;
    } else if constexpr (std::is_same_v<Value, bool>) {
      if (word != "true" && word != "false") refuse(option, word);
      *target = word == "true";
    } else {
      *target = number<Value>(option, word);
    }
  };
  std::visit(store, option.target);
}

std::string kind_of(const TrainOption& option) {
  static constexpr const char* kKinds[] = {"true or false", "a whole number", "a whole number", "a number", "a string"};
  return kKinds[option.target.index()];
}

std::string value_of(const TrainOption& option) {
  const auto write = [](const auto* target) {
    if constexpr (std::is_same_v<decltype(target), const bool*>)
      return std::string();
    else
      return text(*target);
  };
  return std::visit(write, option.target);
}

}  // namespace tessera::cli
