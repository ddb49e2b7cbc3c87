#include "cli/demo_command.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/demo_report.h"
#include "cli/held_signals.h"
#include "cli/output.h"
#include "cli/readable.h"
#include "cli/train_command.h"
#include "models/llama_config.h"
#include "models/text_file.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;

/// What the demo trains. Full size: some minutes on two slow cores.
struct Plan {
  models::LlamaConfig model;
  int64_t batch, steps, short_steps, warmup, validation_samples, sample;
};

Plan plan_of(DemoSize size) {
  constexpr int64_t kBytes = 256;  // a vocabulary of single bytes
  if (size == DemoSize::quick)
    return {{.layers = 2, .width = 64, .heads = 4, .kv_heads = 4, .hidden = 176, .vocab = kBytes, .context = 64},
            4,
            60,
            5,
            5,
            64,
            200};
  return {{.layers = 6, .width = 256, .heads = 8, .kv_heads = 8, .hidden = 688, .vocab = kBytes, .context = 128},
          8,
          400,
          20,
          20,
          256,
          600};
}

/// A folder for what the runs report, which goes when this does.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "tessera-demo-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      throw SystemError(text("no folder can be made in ", fs::temp_directory_path(), ": ", std::strerror(errno)));
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;  // there is nobody to tell, and nothing to do about it
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

std::string find_text(const std::string& given) {
  if (!given.empty()) return given;
  const fs::path beside = fs::read_symlink("/proc/self/exe").parent_path() / "../../../data/shakespeare.txt",
                 here = "data/shakespeare.txt";
  for (const auto& file : {beside, here})
    if (fs::exists(file)) return fs::weakly_canonical(file).string();
  throw DataError(
      text("the text to train on is neither ", beside.lexically_normal(), " nor ", here, "; name one with --data FILE"));
}

class Demo {
 public:
  explicit Demo(const DemoCommand& command)
      : command_(command), plan_(plan_of(command.size)), data_(find_text(command.data)) {}

  int run() {
    const auto bytes = models::read_file(data_).size();  // says what is wrong with a file that can't be used
    say(introduction(bytes));
    const std::string short_steps = text(plan_.short_steps, plan_.short_steps == 1 ? " step" : " steps");
    say(text("\n[1/3] Training under zero3. A model that knows nothing has a loss of ln 256 = ", fixed(std::log(256.0), 2),
             " nats a byte.\n"));
    if (!train("zero3", plan_.steps, plan_.validation_samples,
               {"--placement", "zero3", "--sample", std::to_string(plan_.sample)}))
      return status_;
    say(text("\n[2/3] ", short_steps, " under ddp, where every rank keeps everything, to compare memory.\n"));
    if (!train("ddp", plan_.short_steps, command_.ranks, {"--placement", "ddp"})) return status_;
    say(text("\n[3/3] ", short_steps, " under zero3 and the same unsharded, by libtorch alone, to compare numbers.\n"));
    if (!train("compare", plan_.short_steps, command_.ranks, {"--placement", "zero3", "--compare", "unsharded"}))
      return status_;
    say(demo_report(results_));
    if (!command_.json.empty()) write_json(command_.json, results_);
    return 0;
  }

 private:
  void say(const std::string& words) const {
    if (command_.json == "-")
      std::fputs(words.c_str(), stderr);
    else
      print(words);
  }

  std::string introduction(size_t bytes) const {
    const auto& model = plan_.model;
    return text(
        "A small language model learns to write like a text, on ", command_.ranks,
        command_.ranks == 1 ? " process" : " processes",
        " of this machine (\"ranks\").\n"
        "Each rank reads other parts of the text. What training has to remember (parameters, their gradients, and the\n"
        "optimizer's two moments of each) is split between the ranks: that is the placement zero3. A rank keeps its part\n"
        "and reads the others' where it computes with them.\n\n",
        table({{"model", text("Llama, ", model.layers, " blocks, width ", model.width, ", ", model.heads,
                              " heads: ", grouped(model.parameters()), " parameters")},
               {"text", text(data_, ", ", fixed(static_cast<double>(bytes) / 1e6, 1),
                             " MB, byte by byte; the last tenth is kept to test on")},
               {"steps",
                text(plan_.steps, " of ", command_.ranks, " × ", plan_.batch, " samples of ", model.context, " bytes")}},
              "  ", Align::left));
  }

  Arguments arguments(int64_t steps, int64_t validation_samples) const {
    const auto& model = plan_.model;
    Arguments all{"train"};
    const auto add = [&](const char* option, const auto& value) {
      all.emplace_back(option);
      all.push_back(text(value));
    };
    add("--data", data_);
    add("--layers", model.layers);
    add("--width", model.width);
    add("--heads", model.heads);
    add("--hidden", model.hidden);
    add("--vocab", model.vocab);
    add("--context", model.context);
    add("--batch", plan_.batch);
    add("--steps", steps);
    add("--ranks", command_.ranks);
    add("--lr", 2e-3);
    add("--warmup", plan_.warmup);
    add("--min-lr", 0.1);
    add("--clip", 1.0);
    add("--validation-samples", validation_samples);
    add("--show", "progress");
    return all;
  }

  /// Runs it and keeps what it reports under `name`. False if it failed; `status_` says how.
  bool train(const std::string& name, int64_t steps, int64_t validation_samples, const Arguments& more) {
    Arguments all = arguments(steps, validation_samples);
    all.insert(all.end(), more.begin(), more.end());
    const std::string file = folder_.file(name + ".json");
    all.insert(all.end(), {"--json", file});
    status_ = start_ranks(command_.ranks, /*threads=*/0, all);
    if (status_ == 0) results_[name] = nlohmann::json::parse(models::read_file(file));
    return status_ == 0;
  }

  const DemoCommand& command_;
  Plan plan_;
  std::string data_;
  Folder folder_;
  nlohmann::json results_ = nlohmann::json::object();
  int status_ = 0;
};

}  // namespace

int demo_command(const DemoCommand& command) {
  if (!command.json.empty()) check_json_destination(command.json);
  const HeldSignals held;  // between the runs, which take them themselves: the folder must not stay behind
  return Demo(command).run();
}

}  // namespace tessera::cli
