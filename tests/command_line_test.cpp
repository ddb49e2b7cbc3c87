#include "cli/command_line.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/config_file.h"
#include "cli/output.h"
#include "tessera/base/error.h"
#include "tests/support/program.h"

namespace tessera::cli {
namespace {

using Arguments = std::vector<std::string>;

/// The message of the ConfigError that `arguments` give.
std::string refusal(const Arguments& arguments) {
  try {
    parse_command_line(arguments);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "(accepted)";
}

TrainCommand train(Arguments arguments) {
  arguments.insert(arguments.begin(), "train");
  return std::get<TrainCommand>(parse_command_line(arguments));
}

std::string help_of(const Arguments& arguments) { return std::get<HelpCommand>(parse_command_line(arguments)).text; }

std::string validation_error(const Arguments& arguments) {
  try {
    auto options = train(arguments).options;
    validate(options);
  } catch (const Error& error) {
    return error.what();
  }
  return "(accepted)";
}

std::string written(const TestFolder& folder, const std::string& name, const std::string& bytes) {
  std::ofstream(folder.file(name), std::ios::binary) << bytes;
  return folder.file(name);
}

std::string config_error(const std::string& toml) {
  const TestFolder folder;
  const std::string file = written(folder, "run.toml", toml);
  const std::string message = refusal({"train", "--config", file});
  EXPECT_EQ(message.find(text("file \"", file, "\", line ")), 0u) << message;
  const size_t at = message.find(", line ");
  return at == std::string::npos ? message : message.substr(at + 2);
}

#define EXPECT_HAS(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

TEST(CommandLine, TakesEveryOptionOfTrain) {
  const auto command = train({"--data", "a.txt",      "--layers", "3",         "--width=96", "--heads",
                              "6",      "--kv-heads", "2",        "--hidden",  "128",        "--vocab",
                              "512",    "--context",  "32",       "--batch",   "2",          "--accumulate",
                              "4",      "--steps",    "7",        "--ranks",   "2",          "--placement",
                              "zero2",  "--dtype",    "bf16",     "--lr",      "1e-3",       "--clip",
                              "1",      "--seed",     "5",        "--compare", "unsharded",  "--threads-per-rank",
                              "3",      "--schedule", "--json",   "r.json"});
  const TrainOptions& options = command.options;
  EXPECT_EQ(options.data, "a.txt");
  EXPECT_EQ(options.model.layers, 3);
  EXPECT_EQ(options.model.width, 96);
  EXPECT_EQ(options.model.heads, 6);
  EXPECT_EQ(options.model.kv_heads, 2);
  EXPECT_EQ(options.model.hidden, 128);
  EXPECT_EQ(options.model.vocab, 512);
  EXPECT_EQ(options.model.context, 32);
  EXPECT_EQ(options.batch, 2);
  EXPECT_EQ(options.accumulate, 4);
  EXPECT_EQ(options.steps, 7);
  EXPECT_EQ(options.ranks, 2);
  EXPECT_EQ(options.placement, "zero2");
  EXPECT_EQ(options.dtype, "bf16");
  EXPECT_EQ(options.lr, 1e-3);
  EXPECT_EQ(options.clip, 1.0);
  EXPECT_EQ(options.seed, 5);
  EXPECT_EQ(options.compare, "unsharded");
  EXPECT_EQ(options.threads_per_rank, 3);
  EXPECT_TRUE(options.schedule);
  EXPECT_EQ(options.json, "r.json");
  EXPECT_EQ(command.arguments.front(), "--data");
  EXPECT_TRUE(command.given.contains("kv-heads"));
  EXPECT_FALSE(command.given.contains("warmup"));
}

TEST(CommandLine, DefaultsAreThoseOfTheOptions) {
  auto options = train({}).options;
  EXPECT_EQ(options.data, "random");
  EXPECT_EQ(options.model.width, 768);
  EXPECT_EQ(options.placement, "zero3");
  EXPECT_EQ(options.ranks, 1);
  options.model.heads = 4;
  validate(options);
  EXPECT_EQ(options.model.kv_heads, 4);
}

TEST(CommandLine, SuggestsTheNearestName) {
  EXPECT_HAS(refusal({"tarin"}), "unknown command 'tarin'; did you mean 'train'?");
  EXPECT_HAS(refusal({"train", "--lyaers", "3"}), "unknown option '--lyaers'; did you mean '--layers'?");
  EXPECT_HAS(refusal({"train", "--kv_heads=3"}), "unknown option '--kv_heads'; did you mean '--kv-heads'?");
  EXPECT_HAS(refusal({"launch", "-n", "2", "--jsno", "--", "true"}), "did you mean '--json'?");
  EXPECT_HAS(refusal({"demo", "--quik"}), "did you mean '--quick'?");
  EXPECT_HAS(refusal({"doctor", "--jason"}), "did you mean '--json'?");
  EXPECT_HAS(refusal({"train", "--entirely-else"}), "unknown option '--entirely-else'; see: tessera train --help");
}

TEST(CommandLine, RefusesWhatCantBeMeant) {
  EXPECT_HAS(refusal({}), "no command");
  EXPECT_HAS(refusal({"train", "file.txt"}), "unexpected argument 'file.txt'");
  EXPECT_HAS(refusal({"train", "--layers"}), "an option lacks its value: --layers");
  EXPECT_HAS(refusal({"train", "--layers", "two"}), "option layers wants a whole number, but got 'two'");
  EXPECT_HAS(refusal({"train", "--layers", "2.5"}), "option layers wants a whole number, but got '2.5'");
  EXPECT_HAS(refusal({"train", "--lr", "fast"}), "option lr wants a number, but got 'fast'");
  EXPECT_HAS(refusal({"train", "--ranks", "99999999999"}), "option ranks: 99999999999 is out of range");
  EXPECT_HAS(refusal({"train", "--layers", "2", "--layers", "3"}), "option --layers is given more than once");
  EXPECT_HAS(refusal({"train", "--layers=", "--steps", "2"}), "option layers wants a whole number, but got ''");
  EXPECT_HAS(refusal({"--hlep"}), "unknown option '--hlep'; did you mean '--help'?");
  EXPECT_HAS(refusal({"train", "--show", "some"}), "option show must be all, progress or nothing, but is 'some'");
}

TEST(CommandLine, EveryCommandHasHelp) {
  EXPECT_HAS(help_of({"--help"}), "doctor");
  EXPECT_HAS(help_of({"train", "--help"}), "--threads-per-rank");
  EXPECT_HAS(help_of({"train", "-h"}), "0: as many as heads [0]");
  EXPECT_HAS(help_of({"launch", "--help"}), "-n,--ranks");
  EXPECT_HAS(help_of({"doctor", "--help"}), "--json");
  EXPECT_HAS(help_of({"demo", "--help"}), "--quick");
}

TEST(CommandLine, HelpListsEveryOptionOnce) {
  const std::string help = help_of({"train", "--help"});
  TrainOptions options;
  for (const auto& option : train_option_table(options)) {
    const std::string listed = " --" + option.name + " ";
    const size_t at = help.find(listed);
    EXPECT_NE(at, std::string::npos) << option.name;
    EXPECT_EQ(help.find(listed, at + 1), std::string::npos) << option.name;
  }
}

TEST(CommandLine, JsonMayStandAlone) {
  EXPECT_EQ(train({"--json", "--steps", "3"}).options.json, "-");
  EXPECT_EQ(train({"--json", "-"}).options.json, "-");
  EXPECT_EQ(train({"--json"}).options.json, "-");
  EXPECT_EQ(std::get<DoctorCommand>(parse_command_line({"doctor", "--json"})).json, "-");
  EXPECT_EQ(std::get<DemoCommand>(parse_command_line({"demo", "--json", "x.json", "--quick"})).json, "x.json");
}

TEST(CommandLine, LaunchTakesWhatFollowsTheDashes) {
  const auto command =
      std::get<LaunchCommand>(parse_command_line({"launch", "-n", "3", "--json", "--", "prog", "--help", "--", "-n"}));
  EXPECT_EQ(command.options.ranks, 3);
  EXPECT_EQ(command.options.command, (Arguments{"prog", "--help", "--", "-n"}));
  EXPECT_EQ(command.json, "-");
  EXPECT_HAS(refusal({"launch", "-n", "2", "prog"}), "after two dashes");
  EXPECT_HAS(refusal({"launch", "-n", "2"}), "no program");
  EXPECT_HAS(refusal({"launch", "-n", "2", "--"}), "no program");
  EXPECT_HAS(refusal({"launch", "--", "prog"}), "option -n is missing");
}

TEST(ConfigFile, TakesDashesAndUnderscoresAndTheCommandLineWins) {
  const TestFolder folder;
  const std::string file = written(
      folder, "run.toml",
      "layers = 2\nkv-heads = 3\nmin_lr = 0.5\nlr = 1\nschedule = true\nplacement = \"ddp\"\nthreads_per_rank = 2\n");
  const auto command = train({"--layers", "5", "--config", file, "--placement", "zero1"});
  EXPECT_EQ(command.options.model.layers, 5);
  EXPECT_EQ(command.options.model.kv_heads, 3);
  EXPECT_EQ(command.options.min_lr, 0.5);
  EXPECT_EQ(command.options.lr, 1.0);
  EXPECT_TRUE(command.options.schedule);
  EXPECT_EQ(command.options.placement, "zero1");
  EXPECT_EQ(command.options.threads_per_rank, 2);
  EXPECT_EQ(command.given,
            (std::set<std::string>{"layers", "kv-heads", "min-lr", "lr", "schedule", "placement", "threads-per-rank"}));
}

TEST(ConfigFile, NamesLineAndNearestKey) {
  EXPECT_EQ(config_error("layers = 2\n\nwitdh = 3\n"), "line 3: unknown key 'witdh'; did you mean 'width'?");
  EXPECT_EQ(config_error("config = 2\n").substr(0, 29), "line 1: unknown key 'config'");
  EXPECT_EQ(config_error("\n[model]\nlayers = 2\n"), "line 2: unknown key 'model', a table; keys stand at the top level");
}

TEST(ConfigFile, SaysWhatItWantsAndGot) {
  EXPECT_EQ(config_error("layers = 2.5\n"), "line 1: key 'layers' wants a whole number, but got the number 2.5");
  EXPECT_EQ(config_error("steps = 1\nlayers = \"2\"\n"),
            "line 2: key 'layers' wants a whole number, but got the string \"2\"");
  EXPECT_EQ(config_error("ranks = 9999999999\n"),
            "line 1: key 'ranks' wants a whole number, but got the whole number 9999999999");
  EXPECT_EQ(config_error("lr = true\n"), "line 1: key 'lr' wants a number, but got true");
  EXPECT_EQ(config_error("schedule = 1\n"), "line 1: key 'schedule' wants true or false, but got the whole number 1");
  EXPECT_EQ(config_error("data = [1]\n"), "line 1: key 'data' wants a string, but got an array");
  EXPECT_EQ(config_error("data = 2024-01-02\n"), "line 1: key 'data' wants a string, but got a date or time");
  EXPECT_HAS(config_error("layers = 2\nlayers = 3\n"), "line 2");
  EXPECT_HAS(config_error("kv-heads = 2\nkv_heads = 3\n"), "given twice");
  EXPECT_HAS(config_error("layers = \n"), "line 1");
}

TEST(ConfigFile, MustBeThere) {
  EXPECT_THROW(train({"--config", "/no/such/file.toml"}), DataError);
  EXPECT_THROW(train({"--config", "/"}), DataError);
}

TEST(TrainOptions, SaysWhatIsWanted) {
  EXPECT_EQ(validation_error({"--steps", "0"}).find("option steps must be a whole number from 1 to "), 0u);
  EXPECT_EQ(validation_error({"--lr", "-1"}), "option lr must be a finite number, at least 0, but is -1");
  EXPECT_EQ(validation_error({"--lr", "nan"}), "option lr must be a finite number, at least 0, but is nan");
  EXPECT_EQ(validation_error({"--beta1", "1"}), "option beta1 must be a number from 0 to less than 1, but is 1");
  EXPECT_EQ(validation_error({"--min-lr", "1.5"}), "option min-lr must be a number from 0 to 1, but is 1.5");
  EXPECT_EQ(validation_error({"--eps", "0"}), "option eps must be a finite number above 0, but is 0");
  EXPECT_EQ(validation_error({"--placement", "zreo3"}),
            "option placement must be one of ddp, zero1, zero2, zero3, but is 'zreo3'; did you mean 'zero3'?");
  EXPECT_EQ(validation_error({"--dtype", "fp16"}), "option dtype must be one of fp32, bf16, but is 'fp16'");
  EXPECT_HAS(validation_error({"--compare", "sharded"}), "option compare must be one of empty, unsharded");
  EXPECT_HAS(validation_error({"--heads", "7"}), "option heads must divide width (768), but is 7");
  EXPECT_HAS(validation_error({"--kv-heads", "5"}), "option kv-heads must divide heads (12), but is 5");
  EXPECT_HAS(validation_error({"--width", "99999999999"}), "option width must be a whole number from 1 to 1048576");
  EXPECT_HAS(validation_error({"--ranks", "0"}), "option ranks must be a whole number from 1 to 1024");
  EXPECT_HAS(validation_error({"--sample", "9"}), "option sample needs a text");
}

TEST(TrainOptions, LooksAtFilesFirst) {
  const TestFolder folder;
  const std::string empty = written(folder, "empty.txt", ""), words = written(folder, "words.txt", "to be or not to be\n");
  EXPECT_HAS(validation_error({"--data", folder.file("none.txt")}), "can't be opened");
  EXPECT_HAS(validation_error({"--data", empty}), "is empty");
  EXPECT_HAS(validation_error({"--data", folder.file("")}), "is a directory");
  EXPECT_HAS(validation_error({"--data", "/dev/zero"}), "is not a regular file");
  EXPECT_HAS(validation_error({"--data", words, "--vocab", "100"}), "option vocab must be at least 256");
  EXPECT_EQ(validation_error({"--data", words, "--vocab", "256"}), "(accepted)");
  EXPECT_HAS(validation_error({"--json", folder.file("")}), "a directory; name a file in it");
  EXPECT_HAS(validation_error({"--json", "/dev/null"}), "no regular file");
  EXPECT_HAS(validation_error({"--json", words + "/result.json"}), "is not a directory");
  EXPECT_HAS(validation_error({"--run-directory", words}), "is not a directory");
  EXPECT_EQ(validation_error({"--run-directory", folder.file("a/b/c"), "--json", folder.file("d/e.json")}), "(accepted)");
  EXPECT_TRUE(folder.holds_nothing_but({"empty.txt", "words.txt"}));
}

TEST(Output, WritesWholeFiles) {
  const TestFolder folder;
  write_json(folder.file("a/r.json"), {{"x", 1}, {"bytes", "\xff"}});
  write_json(folder.file("a/r.json"), {{"x", NAN}});
  std::ifstream stream(folder.file("a/r.json"));
  const std::string bytes(std::istreambuf_iterator<char>(stream), {});
  EXPECT_EQ(bytes, "{\"x\":null}\n");
  const auto files = std::filesystem::directory_iterator(folder.file("a"));
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
  EXPECT_THROW(write_json(folder.file("a/r.json/s.json"), {}), SystemError);
}

TEST(Program, ExitStatusSaysWhoseFaultItWas) {
  TESSERA_NEEDS_PROGRAM;
  ProgramRun help({"--help"}), unknown({"tarin"}), option({"train", "--lyaers", "2"}), value({"train", "--heads", "7"}),
      data({"train", "--data", "/no/such/file", "--ranks", "2"}),
      launched({"launch", "-n", "2", "--", "/bin/sh", "-c", "exit 7"});
  EXPECT_EQ(help.status(), 0);
  EXPECT_HAS(help.out(), "Usage: tessera COMMAND");
  EXPECT_EQ(help.err(), "");
  EXPECT_EQ(unknown.status(), 2);
  EXPECT_EQ(unknown.err(), "tessera: unknown command 'tarin'; did you mean 'train'?; see: tessera --help\n");
  EXPECT_EQ(option.status(), 2);
  EXPECT_EQ(value.status(), 2);
  EXPECT_EQ(data.status(), 1);
  EXPECT_EQ(data.err().find("tessera: option data: file '/no/such/file' can't be opened"), 0u) << data.err();
  EXPECT_EQ(launched.status(), 7);
}

TEST(Program, TakesRanksFromTheLauncherOrRefuses) {
  TESSERA_NEEDS_PROGRAM;
  ProgramRun run({"train", "--ranks", "3"}, {"RANK=0", "WORLD_SIZE=2"});
  EXPECT_EQ(run.status(), 2);
  EXPECT_HAS(run.err(), "option ranks is 3, but torchrun started 2 ranks");
}

TEST(Program, DoctorAndLaunchWriteJson) {
  TESSERA_NEEDS_PROGRAM;
  const TestFolder folder;
  ProgramRun doctor({"doctor", "--json"}),
      launched({"launch", "-n", "2", "--json", folder.file("l.json"), "--", "/bin/true"});
  doctor.status();
  EXPECT_TRUE(nlohmann::json::parse(doctor.out()).contains("findings"));
  EXPECT_EQ(launched.status(), 0);
  std::ifstream stream(folder.file("l.json"));
  EXPECT_EQ(nlohmann::json::parse(stream).at("ranks"), 2);
}

TEST(Program, SaysWhenStandardOutputIsFull) {
  TESSERA_NEEDS_PROGRAM;
  ProgramRun run({"launch", "-n", "1", "--", "/bin/sh", "-c", text("exec ", *program(), " --help > /dev/full")});
  EXPECT_EQ(run.status(), 1);
  EXPECT_HAS(run.err(), "standard output can't be written: No space left on device");
}

}  // namespace
}  // namespace tessera::cli
