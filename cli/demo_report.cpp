#include "cli/demo_report.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/readable.h"
#include "cli/state_formula.h"
#include "cli/train_report.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

using nlohmann::json;

double number(const json& value) { return value.is_number() ? value.get<double>() : NAN; }

std::string learned(const json& run) {
  const json& validation = run.at("validation");
  const double model = number(validation.at("nats_per_byte")), bigram = number(validation.at("bigram_nats_per_byte"));
  return text("\nWhat it learned, in nats a byte (less is better)\n",
              table({{"loss at the first step", fixed(number(run.at("loss").front()), 4),
                      text("knows nothing: ln 256 = ", fixed(std::log(256.0), 4))},
                     {"loss on text it has not seen", fixed(model, 4), ""},
                     {"best byte-level bigram model", fixed(bigram, 4),
                      model < bigram ? "out of reach for a table of byte pairs" : "not passed yet"}},
                    "  ", Align::left));
}

std::string saved(const json& ddp, const json& zero3) {
  std::vector<std::vector<std::string>> rows{state_heading()};
  for (const auto& [run, name] : {std::pair{&ddp, "ddp"}, {&zero3, "zero3"}}) {
    const auto more = state_rows(*run, name);
    rows.insert(rows.end(), more.begin(), more.end());
  }
  const auto sum = [](const json& run) {
    return state_formula(run.at("placement"), run.at("dtype"), run.at("gradient_dtype"), run.at("ranks"))
        .bytes(run.at("parameters").get<int64_t>());
  };
  return text("\nWhat sharding saved: bytes of model state on each rank, measured, and by the formula (Ψ = ",
              grouped(zero3.at("parameters")), ")\n", table(rows, "  "), "  ", binary_size(sum(ddp)), " a rank under ddp, ",
              binary_size(sum(zero3)), " under zero3\n");
}

std::string same(const json& compare) {
  const json& difference = compare.at("difference");
  return text("\nBeside the unsharded run, after ", compare.at("loss").size(), " steps: largest difference of a loss ",
              number(difference.at("loss")), ", of a parameter ", number(difference.at("parameters")), "\n");
}

std::string written(const json& run) {
  if (!run.contains("sample")) return "";
  const std::string words = run["sample"];
  return text("\nWhat it writes\n", words, words.ends_with('\n') ? "" : "\n");
}

}  // namespace

std::string demo_report(const json& results) {
  return learned(results.at("zero3")) + saved(results.at("ddp"), results.at("zero3")) + same(results.at("compare")) +
         written(results.at("zero3"));
}

}  // namespace tessera::cli
