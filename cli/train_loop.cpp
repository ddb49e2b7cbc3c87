#include "cli/train_loop.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/memory_sampler.h"
#include "cli/run_log.h"
#include "cli/unsharded_run.h"
#include "models/bigram.h"
#include "models/generate.h"
#include "models/llama.h"
#include "models/synthetic_data.h"
#include "models/text_data.h"
#include "tessera/base/text.h"
#include "tessera/tessera.h"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

double milliseconds(std::chrono::nanoseconds span) { return std::chrono::duration<double, std::milli>(span).count(); }

std::unique_ptr<models::TokenSource> open_data(const TrainOptions& options) {
  const auto seed = static_cast<uint64_t>(options.seed);
  if (options.data == "random")
    return std::make_unique<models::SyntheticData>(options.model.vocab, options.model.context, seed);
  return models::TextData::load(options.data, options.model.vocab, options.run_directory, options.model.context, seed);
}

std::string names_of_blocks(int64_t first, int64_t end) {
  std::string numbers;
  for (int64_t block = first; block < end; ++block) numbers += text(block == first ? "" : "|", block);
  return text("model.layers.@(", numbers, ")");
}

ShardOptions shard_options(const TrainOptions& options) {
  ShardOptions shard{.placements = placements_named(options.placement)};
  if (const int64_t blocks = blocks_a_unit(options); blocks > 0) {
    shard.units = units_of<models::LlamaBlockImpl>();
    for (int64_t first = 0; blocks > 1 && first < options.model.layers; first += blocks)
      shard.joined.push_back(names_of_blocks(first, std::min(first + blocks, options.model.layers)));
  }
  if (options.kept == "root") shard.kept = {"(root)"};
  shard.reshard_after_forward = options.kept != "all";
  shard.non_finite = options.non_finite == "skip" ? NonFinite::skip : NonFinite::stop;
  if (options.dtype == "bf16") {
    shard.precision.working = torch::kBFloat16;
    // Several micro-batches add up in the gradient shard, where bf16 would lose their low bits.
    if (options.accumulate > 1 && shard.placements.gradient == Placement::sharded) shard.precision.gradient = torch::kFloat;
  }
  return shard;
}

// What the timings of one rank add up to.
struct Phases {
  double forward = 0, backward = 0, optimizer = 0;
};

class Run {
 public:
  Run(const TrainOptions& options, const World& world, const std::function<void(const TrainProgress&)>& progress)
      : options_(options), world_(world), progress_(progress), data_(open_data(options)) {
    torch::manual_seed(static_cast<uint64_t>(options.seed));
    model_ = models::Llama(options.model);
    sharded_ = std::make_unique<Sharded>(fully_shard(model_, Mesh(world), shard_options(options)));
    optimizer_ = std::make_unique<AdamW>(*sharded_,
                                         AdamWOptions{.lr = options.lr,
                                                      .beta1 = options.beta1,
                                                      .beta2 = options.beta2,
                                                      .eps = options.eps,
                                                      .weight_decay = options.weight_decay,
                                                      .fused_reduction = options.clip == 0 && options.non_finite == "stop"});
    if (world.rank.value == 0 && !options.run_directory.empty()) log_ = std::make_unique<RunLog>(options.run_directory);
  }

  json run() {
    try {
      for (int64_t step = 0; step < options_.steps; ++step) run_step(step);
      return results();
    } catch (const std::exception& error) {
      sharded_->engine().communicator().fail(error.what());
      throw;
    }
  }

 private:
  bool leader() const { return world_.rank.value == 0; }

  void run_step(int64_t step) {
    if (step == kSampledSteps) sampler_.stop();
    const Traffic before = sharded_->engine().traffic();
    const auto start = Clock::now();
    double loss = 0;
    for (int64_t micro = 0; micro < options_.accumulate; ++micro)
      loss += run_micro_batch(step, micro) / static_cast<double>(options_.accumulate);
    const auto computed = Clock::now();
    if (options_.clip > 0) sharded_->clip_grad_norm(options_.clip);
    optimizer_->options().lr = learning_rate(options_, step);
    optimizer_->step();
    optimizer_->zero_grad();
    const auto end = Clock::now();
    phases_.optimizer += milliseconds(end - computed);
    losses_.push_back(loss);
    step_ms_.push_back(milliseconds(end - start));
    if (step + 1 == kSampledSteps &&
        options_.steps > 2 * kSampledSteps) {  // what comes later is alike, and not slowed by the sampler
      counted_from_ = sharded_->engine().traffic();
      counted_steps_ = -1;  // this one does not count
      phases_ = {};
    }
    ++counted_steps_;
    const Traffic after = sharded_->engine().traffic();
    const double exposed = milliseconds(after.gather_wait + after.reduce_wait - before.gather_wait - before.reduce_wait);
    if (log_) log_->write({{"step", step + 1}, {"loss", loss}, {"step_ms", step_ms_.back()}});
    if (leader() && progress_) report(step, exposed);
    if (options_.validate_every > 0 && (step + 1) % options_.validate_every == 0 && step + 1 < options_.steps)
      validations_.push_back({step + 1, validate()});
  }

  double run_micro_batch(int64_t step, int64_t micro) {
    const auto tokens = data_->batch(step * options_.accumulate + micro, world_.rank, world_.size, options_.batch);
    const auto start = Clock::now();
    const auto loss = model_->loss(tokens);
    const double value = loss.item<double>();
    if (!std::isfinite(value) && options_.non_finite == "stop") refuse(step, value, tokens);
    const auto forward = Clock::now();
    if (micro + 1 < options_.accumulate) {
      const auto scope = sharded_->accumulating();
      (loss / static_cast<double>(options_.accumulate)).backward();
    } else {
      (options_.accumulate > 1 ? loss / static_cast<double>(options_.accumulate) : loss).backward();
    }
    phases_.forward += milliseconds(forward - start);
    phases_.backward += milliseconds(Clock::now() - forward);
    return value;
  }

  [[noreturn]] void refuse(int64_t step, double loss, const torch::Tensor& tokens) {
    const torch::NoGradGuard no_grad;
    sharded_->engine().watch_non_finite(true);
    model_->loss(tokens);
    const std::string& where = sharded_->engine().first_non_finite();
    throw NonFiniteError(text(
        "step ", step + 1, ", rank ", world_.rank.value, ": the loss is ", loss,
        "; the first result that is not finite came from ", where.empty() ? std::string("the loss itself") : where,
        ". Lower --lr, use --clip 1.0, or look at the data of this step; --non-finite skip goes on without such steps"));
  }

  void report(int64_t step, double exposed_ms) {
    const size_t window = std::min<size_t>(step_ms_.size(), 20);
    double recent = 0;
    for (size_t i = step_ms_.size() - window; i < step_ms_.size(); ++i) recent += step_ms_[i];
    recent /= static_cast<double>(window);
    progress_({.step = step + 1,
               .steps = options_.steps,
               .loss = losses_.back(),
               .tokens_per_second = static_cast<double>(tokens_per_step()) / recent * 1e3,
               .memory_bytes = static_cast<double>(resident_now().value),
               .exposed_share = exposed_ms / step_ms_.back(),
               .seconds_left = static_cast<double>(options_.steps - step - 1) * recent / 1e3});
  }

  int64_t tokens_per_step() const { return options_.batch * options_.accumulate * options_.model.context * world_.size; }

  // Mean cross entropy a token over the held-out samples, in nats; each rank computes its part of them.
  double validate() {
    const torch::NoGradGuard no_grad;
    const int64_t samples = std::min(options_.validation_samples, data_->validation_samples());
    double sum = 0;
    for (int64_t i = world_.rank.value; i < samples; i += world_.size)
      sum += model_->loss(data_->validation_batch(i, 1)).item<double>();
    double total = 0;
    for (const auto& theirs : gather("validation", sum)) total += theirs.get<double>();
    return total / static_cast<double>(samples);
  }

  std::vector<json> gather(const std::string& label, const json& mine) {
    std::vector<json> all;
    for (const auto& theirs : sharded_->engine().communicator().all_gather(label, mine.dump()))
      all.push_back(json::parse(theirs));
    return all;
  }

  json rank_result() {
    const StateBytes bytes = sharded_->state_bytes();
    const Traffic end = sharded_->engine().traffic();
    const auto steps = static_cast<double>(counted_steps_);
    const double gather_wait = milliseconds(end.gather_wait - counted_from_.gather_wait) / steps;
    const double reduce_wait = milliseconds(end.reduce_wait - counted_from_.reduce_wait) / steps;
    sampler_.stop();
    const auto whole = [](double value) { return std::llround(value); };
    return {{"bytes",
             {{"parameters", whole(bytes.parameters)},
              {"gradients", whole(bytes.gradients)},
              {"optimizer", whole(bytes.optimizer)},
              {"padding", whole(bytes.padding)},
              {"communication_buffers", whole(bytes.communication_buffers)}}},
            {"peak_rss_bytes", peak_resident().value},
            {"peak_pss_bytes", sampler_.peak().value},
            {"base_rss_bytes", sampler_.base_resident().value},
            {"base_pss_bytes", sampler_.base_proportional().value},
            {"moved_bytes_per_step",
             {{"gather", whole(static_cast<double>((end.gathered - counted_from_.gathered).value) / steps)},
              {"reduce", whole(static_cast<double>((end.reduced - counted_from_.reduced).value) / steps)}}},
            {"exposed_ms_per_step", gather_wait + reduce_wait},
            {"phases_ms",
             {{"forward", phases_.forward / steps},
              {"backward", phases_.backward / steps},
              {"optimizer", phases_.optimizer / steps},
              {"gather_wait", gather_wait},
              {"reduce_wait", reduce_wait}}}};
  }

  json results() {
    json result;
    const auto per_rank = gather("results", rank_result());
    const auto losses = gather("losses", losses_);
    std::vector<double> mean(losses_.size(), 0);
    for (const auto& theirs : losses)
      for (size_t i = 0; i < mean.size(); ++i)
        mean[i] += theirs.at(i).is_null() ? NAN : theirs.at(i).get<double>() / world_.size;
    result = {{"loss", mean},
              {"step_ms", step_ms_},
              {"tokens_per_second", median_tokens_per_second()},
              {"parameters", sharded_->parameter_count()},
              {"placement", options_.placement},
              {"ranks", world_.size},
              {"dtype", options_.dtype},
              {"gradient_dtype", gradient_dtype()},
              {"per_rank", per_rank}};
    if (options_.data != "random") result["validation"] = validation_result();
    if (leader() && options_.sample > 0) result["sample"] = sample();
    if (options_.schedule) result["schedule"] = sharded_->schedule();
    if (sharded_->engine().skipped() > 0) result["skipped_steps"] = sharded_->engine().skipped();
    const auto parameters = leader() && !options_.compare.empty() ? sharded_->full_parameters()
                                                                  : std::vector<std::pair<std::string, torch::Tensor>>{};
    sharded_->engine().communicator().barrier("end of training");
    if (!leader()) return json::object();
    // Rank 0 runs the same steps alone; the others have nothing more to do.
    if (!options_.compare.empty())
      result["difference"] = compare_with_unsharded(options_, *data_, world_.size, mean, parameters);
    return result;
  }

  std::string gradient_dtype() const {
    return options_.dtype == "bf16" && !shard_options(options_).precision.gradient ? "bf16" : "fp32";
  }

  double median_tokens_per_second() const {
    auto times = step_ms_;
    if (times.size() > 4) times.erase(times.begin(), times.begin() + 2);
    std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2), times.end());
    return static_cast<double>(tokens_per_step()) / times[times.size() / 2] * 1e3;
  }

  json validation_result() {
    const double loss = validate();
    const auto& data = dynamic_cast<const models::TextData&>(*data_);
    json result = {{"loss", loss}, {"nats_per_byte", loss / data.bytes_per_token()}};
    if (leader())
      result["bigram_nats_per_byte"] = models::bigram_baseline(data.training_text(), data.validation_text()).nats_per_byte;
    json during = json::array();
    for (const auto& [step, value] : validations_) during.push_back({{"step", step}, {"loss", value}});
    if (!during.empty()) result["during"] = during;
    return result;
  }

  std::string sample() {
    const auto& data = dynamic_cast<const models::TextData&>(*data_);
    const auto prompt = data.tokenizer().encode("\n");
    const auto tokens =
        models::generate([&](const torch::Tensor& tokens) { return model_->forward(tokens).to(torch::kFloat); }, prompt,
                         {.tokens = options_.sample,
                          .context = options_.model.context,
                          .temperature = 0.8,
                          .seed = static_cast<uint64_t>(options_.seed)});
    return data.tokenizer().decode(tokens);
  }

  static constexpr int64_t kSampledSteps = 2;  // the first steps, whose timings are not used

  TrainOptions options_;
  World world_;
  std::function<void(const TrainProgress&)> progress_;
  MemorySampler sampler_;  // first: its base is what libtorch alone takes
  std::unique_ptr<models::TokenSource> data_;
  models::Llama model_{nullptr};
  std::unique_ptr<Sharded> sharded_;
  std::unique_ptr<AdamW> optimizer_;
  std::unique_ptr<RunLog> log_;
  std::vector<double> losses_, step_ms_;
  std::vector<std::pair<int64_t, double>> validations_;
  Phases phases_;
  Traffic counted_from_;  // phases, waits and bytes are means over the steps after this
  int64_t counted_steps_ = 0;
};

}  // namespace

json train(const TrainOptions& options, const World& world, const std::function<void(const TrainProgress&)>& progress) {
  return Run(options, world, progress).run();
}

}  // namespace tessera::cli
