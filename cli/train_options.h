#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "models/llama_config.h"

namespace tessera::cli {

/// What `tessera train` was asked to do. Member names are those of the command-line options and of the keys in a
/// configuration file.
struct TrainOptions {
  std::string data = "random";  ///< a text file, or "random"
  models::LlamaConfig model;    ///< layers, width, heads, kv_heads (0: as many as heads), hidden, vocab, context
  int64_t batch = 1;            ///< samples a rank and micro-batch
  int64_t accumulate = 1;       ///< micro-batches a step
  int64_t steps = 12;
  int ranks = 1;  ///< local processes to start; under a launcher, what the launcher says
  std::string placement = "zero3";
  std::string dtype = "fp32";  ///< of the working parameters: fp32 or bf16
  double lr = 3e-4;
  int64_t warmup = 0;   ///< steps over which lr rises linearly; then it falls along a cosine to lr · min_lr
  double min_lr = 1.0;  ///< final learning rate as a fraction of lr; 1: constant
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  double clip = 0;  ///< global gradient norm to clip to; 0: do not clip
  int64_t seed = 0;
  std::string compare;              ///< "unsharded" or ""
  int threads_per_rank = 0;         ///< 0: cores / ranks, at least 1
  std::string units = "block";      ///< "block", a number of blocks, or "model": what is gathered together
  std::string kept = "nothing";     ///< "nothing", "root" or "all": what stays gathered from forward to backward
  std::string non_finite = "stop";  ///< "stop" or "skip"
  int64_t validate_every = 0;       ///< steps between validations; 0: only at the end, and only on a text
  int64_t validation_samples = 64;  ///< at most so many samples a validation, over all ranks
  int64_t sample = 0;               ///< tokens of text to generate at the end
  std::string run_directory;        ///< where tokenizer.model and log.jsonl go; empty: nothing is kept
  std::string json;                 ///< file for the result; "-": stdout; empty: none
  bool schedule = false;            ///< print the recorded schedule
  int timeout_ms = 300'000;         ///< how long a rank waits for another
};

/// Blocks that are gathered together; 0 for the whole model.
int64_t blocks_a_unit(const TrainOptions& options);

/// Throws ConfigError, naming the option, its value and what is wanted, for values that can't be. Fills in kv_heads.
void validate(TrainOptions& options);

}  // namespace tessera::cli
