#include "cli/train_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/readable.h"
#include "cli/state_formula.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

using nlohmann::json;

// Numbers that are not finite are null in JSON.
double number(const json& value) { return value.is_number() ? value.get<double>() : NAN; }

std::string loss_text(const json& value) { return fixed(number(value), 4); }

double median(std::vector<double> values) {
  if (values.empty()) return NAN;
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The largest of a number that each rank has, at `path` ("/moved_bytes_per_step/gather").
double largest(const json& result, const char* path) {
  double most = 0;
  for (const auto& rank : result.at("per_rank")) most = std::max(most, rank.at(json::json_pointer(path)).get<double>());
  return most;
}

std::string duration(double seconds) {
  return seconds < 100 ? text(fixed(seconds, 1), " s") : text(clock_time(seconds), " min");
}

std::string headline(const json& result) {
  const auto times = result.at("step_ms").get<std::vector<double>>();
  const int ranks = result.at("ranks");
  return text("Trained ", times.size(), times.size() == 1 ? " step of " : " steps of ", grouped(result.at("parameters")),
              " parameters, ", result.at("placement").get<std::string>(), ' ', result.at("dtype").get<std::string>(),
              ", on ", ranks, ranks == 1 ? " rank" : " ranks", ", in ",
              duration(std::accumulate(times.begin(), times.end(), 0.0) / 1e3), '\n');
}

std::string named(const std::string& name, const std::string& value) {
  return text("  ", name, std::string(18 - std::min<size_t>(name.size(), 17), ' '), value, '\n');
}

std::string losses(const json& result) {
  const json& loss = result.at("loss");
  std::string lines;
  if (!loss.empty())
    lines = named("loss", text(loss_text(loss.front()), " at the first step, ", loss_text(loss.back()),
                               " at the last (nats a token)"));
  if (result.contains("skipped_steps"))
    lines += named("skipped", text(result["skipped_steps"], " steps with numbers that were not finite"));
  if (!result.contains("validation")) return lines;
  const json& validation = result["validation"];
  lines += named("validation", text(loss_text(validation.at("loss")), " nats a token, ",
                                    loss_text(validation.at("nats_per_byte")), " nats a byte"));
  lines += named("bigram model", text(loss_text(validation.at("bigram_nats_per_byte")),
                                      " nats a byte: the best that a table of byte pairs can do on the same text"));
  return lines;
}

std::string speed(const json& result) {
  const auto times = result.at("step_ms").get<std::vector<double>>();
  const double step = median(times), exposed = largest(result, "/exposed_ms_per_step");
  const double mean =
      std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(std::max<size_t>(times.size(), 1));
  const auto phase = [&](const char* name) { return fixed(largest(result, text("/phases_ms/", name).c_str()), 1); };
  return named("speed", text(grouped(std::llround(result.at("tokens_per_second").get<double>())), " tokens/s; a step takes ",
                             fixed(step, 1), " ms (median)")) +
         named("of a step", text("forward ", phase("forward"), ", backward ", phase("backward"), ", optimizer ",
                                 phase("optimizer"), " ms")) +
         named("exposed",
               text(fixed(exposed, 2), " ms a step (", fixed(mean > 0 ? exposed / mean * 100 : 0, 1),
                    " %) in which a rank waited for another: gather ", fixed(largest(result, "/phases_ms/gather_wait"), 2),
                    ", reduce ", fixed(largest(result, "/phases_ms/reduce_wait"), 2))) +
         named("moved", text("gather ", binary_size(largest(result, "/moved_bytes_per_step/gather")), ", reduce ",
                             binary_size(largest(result, "/moved_bytes_per_step/reduce")), " a rank and step")) +
         named("peak memory",
               text(binary_size(largest(result, "/peak_pss_bytes")), " a rank (PSS), ",
                    binary_size(largest(result, "/peak_rss_bytes")), " with what ranks share counted for each (RSS)"));
}

std::string memory(const json& result) {
  auto rows = state_rows(result, "");
  rows.insert(rows.begin(), state_heading());
  return text("\nBytes of model state on each rank\n", table(rows, "  "));
}

std::string difference(const json& result) {
  if (!result.contains("difference")) return "";
  const json& difference = result["difference"];
  return text("\nLargest difference to the unsharded run: loss ", number(difference.at("loss")), ", parameters ",
              number(difference.at("parameters")), '\n');
}

std::string text_of(const json& result, const char* key, const char* title) {
  if (!result.contains(key)) return "";
  const std::string body = result[key];
  return text('\n', title, '\n', body, body.ends_with('\n') ? "" : "\n");
}

}  // namespace

std::vector<std::string> state_heading() {
  return {"", "parameters", "gradients", "optimizer", "sum", "padding", "buffers"};
}

std::vector<std::vector<std::string>> state_rows(const json& result, const std::string& label) {
  std::vector<std::vector<std::string>> rows;
  const std::string start = label.empty() ? "" : label + ", ";
  for (const auto& rank : result.at("per_rank")) {
    const json& bytes = rank.at("bytes");
    const int64_t parameters = bytes.at("parameters"), gradients = bytes.at("gradients"), optimizer = bytes.at("optimizer");
    rows.push_back({text(start, "rank ", rows.size()), grouped(parameters), grouped(gradients), grouped(optimizer),
                    grouped(parameters + gradients + optimizer), grouped(bytes.at("padding")),
                    grouped(bytes.at("communication_buffers"))});
  }
  const int64_t count = result.at("parameters");
  const auto formula =
      state_formula(result.at("placement"), result.at("dtype"), result.at("gradient_dtype"), result.at("ranks"));
  const auto whole = [&](const auto& term) { return grouped(std::llround(term.bytes(count))); };
  rows.push_back(
      {start + "formula", whole(formula.parameters), whole(formula.gradients), whole(formula.optimizer), whole(formula)});
  rows.push_back({"", formula.parameters.formula(), formula.gradients.formula(), formula.optimizer.formula()});
  return rows;
}

std::string summary_text(const json& result) {
  return headline(result) + losses(result) + speed(result) + memory(result) + difference(result) +
         text_of(result, "sample", "Generated text") + text_of(result, "schedule", "Recorded schedule");
}

}  // namespace tessera::cli
