#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <deque>
#include <span>

#include "cli/config_file.h"
#include "cli/train_option_table.h"
#include "tessera/base/error.h"
#include "tessera/base/suggest.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

using Arguments = std::span<const std::string>;

const std::vector<std::string> kNames{"train", "launch", "doctor", "demo", "--help"};

constexpr const char* kOverview =
    R"(Trains any libtorch model with its state sharded over ranks, with the numbers of the unsharded run.

Usage: tessera COMMAND [OPTIONS]

  train    train a Llama-style language model on a text, on local ranks or under a launcher
  launch   run any program as local ranks
  doctor   say what this machine has, and what is missing for what
  demo     train on Shakespeare, and show what sharding saves

`tessera COMMAND --help` lists a command's options.
Exit status: 0 done; 1 an error at run time; 2 a command line or configuration that can't be meant; 128 + n ended by signal n.
)";

/// The options of one command. CLI11 splits the command line and writes the help; values are converted by whoever asks for
/// them.
class Parser {
 public:
  Parser(std::string command, const std::string& description)
      : command_(std::move(command)), app_(description, "tessera " + command_) {
    app_.allow_extras();
    app_.get_formatter()->column_width(34);
    app_.set_help_flag("-h,--help", "print this");
  }

  void add(const std::string& names, const std::string& value, const std::string& help,
           const std::string& group = "Options") {
    auto& entry = entries_.emplace_back(names);
    if (value.empty())
      entry.option = app_.add_flag(names, help);
    else
      entry.option = app_.add_option(names, entry.text, help)->type_name(value);
    entry.option->group(group)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }

  /// What to do with words that are neither options nor their values.
  void advise(std::string advice) { advice_ = std::move(advice); }

  /// Returns false if help is asked for. Throws ConfigError.
  [[nodiscard]] bool parse(Arguments arguments) {
    std::vector<std::string> reversed = completed(arguments);
    std::reverse(reversed.begin(), reversed.end());  // as CLI11 wants them
    try {
      app_.parse(reversed);
    } catch (const CLI::CallForHelp&) {
      return false;
    } catch (const CLI::ParseError& error) {
      throw ConfigError(text("an option lacks its value: ", error.what(), hint()));
    }
    for (const auto& entry : entries_)
      if (entry.option->count() > 1) throw ConfigError(text("option ", entry.names, " is given more than once", hint()));
    for (const auto& word : app_.remaining()) refuse(word);
    return true;
  }

  /// Whether an option was given, and its value. By the names that it was added with.
  bool given(const std::string& names) const { return find(names).option->count() > 0; }
  const std::string& value(const std::string& names) const { return find(names).text; }

  HelpCommand help() const { return {app_.help()}; }
  std::string hint() const { return text("; see: tessera ", command_, " --help"); }

 private:
  struct Entry {
    explicit Entry(std::string names_) : names(std::move(names_)) {}
    std::string names, text{};
    CLI::Option* option = nullptr;
  };

  // --json may stand alone; then its value is "-". And CLI11 would give "--data=" the next word as its value.
  static std::vector<std::string> completed(Arguments arguments) {
    std::vector<std::string> all;
    for (size_t i = 0; i < arguments.size(); ++i) {
      all.push_back(arguments[i]);
      if (arguments[i].starts_with("--") && arguments[i].find('=') == arguments[i].size() - 1) {
        all.back().pop_back();
        all.emplace_back();
      }
      if (arguments[i] != "--json") continue;
      const bool alone = i + 1 == arguments.size() || (arguments[i + 1].size() > 1 && arguments[i + 1].starts_with('-'));
      if (alone) all.emplace_back("-");
    }
    return all;
  }

  [[noreturn]] void refuse(const std::string& word) const {
    if (!word.starts_with('-')) throw ConfigError(text("unexpected argument '", word, "'", advice_, hint()));
    const std::string name = word.substr(0, word.find('='));
    std::vector<std::string> names{"--help"};
    for (const auto& entry : entries_) names.push_back(entry.names.substr(entry.names.find("--")));
    throw ConfigError(text("unknown option '", name, "'", did_you_mean(name, names), hint()));
  }

  const Entry& find(const std::string& names) const {
    return *std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.names == names; });
  }

  std::string command_, advice_;
  CLI::App app_;
  std::deque<Entry> entries_;  // CLI11 keeps their addresses
};

int whole_number(const std::string& option, const std::string& word) {
  int value = 0;
  assign({.name = option, .target = &value, .group = {}, .value = {}, .help = {}}, word);
  return value;
}

void add_json(Parser& parser) {
  parser.add("--json", "FILE", "where the result goes as JSON; without FILE or with -: standard output");
}

Command parse_train(Arguments arguments) {
  TrainCommand command;
  command.options.model.kv_heads = 0;
  const auto table = train_option_table(command.options);
  Parser parser("train", "Trains a Llama-style language model with its state sharded over ranks.");
  parser.add("--config", "FILE", "TOML with the same names; the command line wins");
  for (const auto& option : table) {
    const std::string now = value_of(option);
    parser.add("--" + option.name, option.value, now.empty() ? option.help : text(option.help, " [", now, "]"),
               option.group);
  }
  parser.add("--show", "WHAT", "all, progress (no summary) or nothing [all]", "Output");
  if (!parser.parse(arguments)) return parser.help();
  if (parser.given("--config")) command.given = read_config(parser.value("--config"), table);
  for (const auto& option : table) {
    if (!parser.given("--" + option.name)) continue;
    assign(option, option.value.empty() ? "true" : parser.value("--" + option.name));
    command.given.insert(option.name);
  }
  if (parser.given("--show")) command.show = parser.value("--show");
  if (command.show != "all" && command.show != "progress" && command.show != "nothing")
    throw ConfigError(text("option show must be all, progress or nothing, but is '", command.show, "'"));
  command.arguments.assign(arguments.begin(), arguments.end());
  return command;
}

Command parse_launch(Arguments arguments) {
  Parser parser(
      "launch",
      "Runs a program as local ranks with torchrun's environment variables: tessera launch -n N [OPTIONS] -- PROGRAM "
      "[ARGUMENTS]\nLines are prefixed by rank. When one rank fails, the others are ended, and it says which, how, and its "
      "last lines.");
  parser.add("-n,--ranks", "N", "how many");
  add_json(parser);
  const std::string example = "; the program stands after two dashes, as in: tessera launch -n 2 -- ./program";
  parser.advise(example);
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  if (!parser.parse(arguments.first(static_cast<size_t>(dashes - arguments.begin())))) return parser.help();
  if (!parser.given("-n,--ranks")) throw ConfigError(text("option -n is missing: how many ranks to start", parser.hint()));
  if (dashes == arguments.end() || dashes + 1 == arguments.end())
    throw ConfigError("there is no program to launch" + example);
  LaunchCommand command;
  command.options.ranks = whole_number("ranks", parser.value("-n,--ranks"));
  command.options.command.assign(dashes + 1, arguments.end());
  command.json = parser.value("--json");
  return command;
}

Command parse_doctor(Arguments arguments) {
  Parser parser("doctor", "Says what this machine has for training, and what is missing for what.");
  add_json(parser);
  if (!parser.parse(arguments)) return parser.help();
  return DoctorCommand{parser.value("--json")};
}

Command parse_demo(Arguments arguments) {
  Parser parser("demo", "Trains a small language model on Shakespeare with its state sharded, and shows what that saves.");
  parser.add("--quick", "", "a smaller model and fewer steps: seconds instead of minutes");
  parser.add("--ranks", "N", "local processes [2]");
  parser.add("--data", "FILE", "another text [data/shakespeare.txt]");
  add_json(parser);
  if (!parser.parse(arguments)) return parser.help();
  DemoCommand command;
  command.size = parser.given("--quick") ? DemoSize::quick : DemoSize::full;
  if (parser.given("--ranks")) command.ranks = whole_number("ranks", parser.value("--ranks"));
  command.data = parser.value("--data");
  command.json = parser.value("--json");
  return command;
}

Command parse(const std::string& name, Arguments arguments) {
  if (name == "train") return parse_train(arguments);
  if (name == "launch") return parse_launch(arguments);
  if (name == "doctor") return parse_doctor(arguments);
  if (name == "demo") return parse_demo(arguments);
  throw ConfigError(text("unknown ", name.starts_with('-') ? "option '" : "command '", name, "'", did_you_mean(name, kNames),
                         "; see: tessera --help"));
}

}  // namespace

Command parse_command_line(const std::vector<std::string>& arguments) {
  if (arguments.empty()) throw ConfigError("no command is given; see: tessera --help");
  const std::string& name = arguments.front();
  if (name == "--help" || name == "-h" || name == "help") return HelpCommand{kOverview};
  return parse(name, Arguments(arguments).subspan(1));
}

}  // namespace tessera::cli
