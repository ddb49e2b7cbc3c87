// Files that can't be loaded: every rank says why, and the model keeps its values.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tests/support/cases.h"
#include "tests/support/deferred_helpers.h"
#include "tests/support/on_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/safetensors_bytes.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/test_folder.h"

namespace tessera::test {
namespace {

using torch::Tensor;
using Words = std::vector<std::string>;

Named net_s_values(int64_t seed) {
  torch::manual_seed(seed);
  return registered(*NetS());
}

/// A sharded net S, from which loading is refused.
struct Refusing {
  Refusing(const World& world, const Placements& placements)
      : sharded(fully_shard(net, mesh_for(world, placements), net_s_options(placements))) {}
  template <class Error>
  void expect(const std::string& path, const Words& words, const LoadOptions& options = {}) {
    expect_words(refusal<Error>([&] { load_at_once(sharded, path, options); }), words);
    expect_equal(registered(*common_net()), whole(sharded, *net));
  }
  NetS net = common_net();
  Sharded sharded;
};

TEST(LoadRefuses, TensorsThatAreNotTheModels) {
  const TestFolder folder;
  auto values = net_s_values(5);
  values["first.weights"] = values.at("first.weight");
  values.erase("first.weight");
  values["last.bias"] = torch::zeros({4});
  values["middle.weight"] = torch::zeros({25});
  values["middle.bias"] = torch::zeros({5}, torch::kInt);
  write_safetensors(folder.file("x"), values);
  for_every_placement([&](const World& world, const Placements& placements) {
    Refusing refusing(world, placements);
    refusing.expect<ConfigError>(folder.file("x"), {folder.file("x"), "missing in the files: 'first.weight'",
                                                    "did you mean 'first.weights'?", "not in the model: 'first.weights'",
                                                    "'last.bias' is Float [3]", "F32 [4]", "'middle.weight' is Float [5, 5]",
                                                    "F32 [25]", "'middle.bias' is Float [5]", "I32 [5]", "optional"});
    const auto rename = [](const std::string& name) { return name == "first.weight" ? "first.weights" : name; };
    refusing.expect<ConfigError>(folder.file("x"), {"'last.bias'"}, {.strict = false, .rename = rename});
    refusing.expect<ConfigError>(folder.file("x"), {"'nothing.*'", "optional"}, {.optional = {"nothing.*"}});
    write_safetensors(folder.file(text("good", world.rank.value)), net_s_values(5));
    load_at_once(refusing.sharded, folder.file(text("good", world.rank.value)));  // and copies are the same file
    expect_equal(net_s_values(5), whole(refusing.sharded, *refusing.net));
  });
}

TEST(LoadRefuses, NamesBehindAPrefixAreSuggested) {
  const TestFolder folder;
  Named values;
  for (const auto& [name, value] : net_s_values(5)) values["net." + name] = value;
  write_safetensors(folder.file("x"), values);
  on_ranks(2, [&](World world) {
    Refusing refusing(world, zero3());
    refusing.expect<ConfigError>(folder.file("x"), {"'middle.bias'; did you mean 'net.middle.bias'?"});
  });
}

TEST(LoadRefuses, LongListsAreCut) {
  const TestFolder folder;
  write_safetensors(folder.file("x"), {});
  on_ranks(1, [&](World world) {
    const auto net = filled([](FilledImpl& filled) {
      for (int i = 0; i < 20; ++i) filled.parameter(text("p", i), torch::zeros({1}));
    })();
    auto sharded = fully_shard(*net, Mesh(world));
    expect_words(refusal<ConfigError>([&] { load_at_once(sharded, folder.file("x")); }), {"'p0'", "'p7'; and 12 more"});
  });
}

TEST(LoadRefuses, WhatATypeCannotHold) {
  struct Case {
    torch::Dtype model, file;
    bool good;
  };
  const Case kCases[] = {
      {torch::kFloat, torch::kFloat8_e4m3fn, true},
      {torch::kFloat, torch::kFloat8_e5m2, true},
      {torch::kFloat, torch::kFloat8_e8m0fnu, true},
      {torch::kLong, torch::kUInt32, true},
      {torch::kLong, torch::kUInt64, false},
      {torch::kFloat, torch::kLong, false},
      {torch::kLong, torch::kFloat, false},
      {torch::kLong, torch::kInt, true},
      {torch::kLong, torch::kByte, true},
      {torch::kLong, torch::kBool, true},
      {torch::kInt, torch::kLong, false},
      {torch::kByte, torch::kChar, false},
      {torch::kChar, torch::kByte, false},
      {torch::kShort, torch::kByte, true},
      {torch::kInt, torch::kUInt16, true},
      {torch::kBool, torch::kByte, false},
      {torch::kFloat, torch::kBool, false},
      {torch::kFloat, torch::kComplexFloat, false},
  };
  const TestFolder folder;
  on_ranks(1, [&](World world) {
    for (const auto& [model, file, good] : kCases)
      for (const bool as_buffer : {false, true}) {
        SCOPED_TRACE(text(c10::toString(model), " from ", c10::toString(file)));
        const Tensor value = torch::tensor({0, 1, 1, 2, 3}).to(file);
        write_safetensors(folder.file("x"), {{"t", value}, {"p", torch::ones({2})}});
        const auto net = filled([&, type = model](FilledImpl& filled) {
          if (as_buffer)
            filled.buffer("t", torch::zeros({5}, type));
          else
            filled.parameter("t", torch::zeros({5}, type), false);
          filled.parameter("p", torch::zeros({2}));
        })();
        auto sharded = fully_shard(*net, Mesh(world));
        if (good) {
          load_at_once(sharded, folder.file("x"));
          EXPECT_TRUE(torch::equal(whole(sharded, *net).at("t"), value.to(model)));
        } else {
          expect_words(refusal<ConfigError>([&] { load_at_once(sharded, folder.file("x")); }),
                       {"'t' is ", folder.file("x")});
        }
      }
  });
}

TEST(LoadRefuses, ComplexTensorsOfAnotherForm) {
  const TestFolder folder;
  torch::manual_seed(1);
  const Tensor values = torch::randn({5, 3}, torch::kComplexDouble);
  const Tensor narrow = values.to(torch::kComplexFloat);
  write_safetensors(folder.file("pairs"), {{"t", torch::view_as_real(values)}});
  write_safetensors(folder.file("complex"), {{"t", narrow}});
  write_safetensors(folder.file("real"), {{"t", torch::real(values)}});
  for_every_placement([&](const World& world, const Placements& placements) {
    const auto net = filled([](FilledImpl& filled) {
      filled.parameter("t", torch::zeros({5, 3}, torch::kComplexDouble));
    })();
    auto sharded = fully_shard(*net, mesh_for(world, placements), {.placements = placements});
    load_at_once(sharded, folder.file("pairs"));
    EXPECT_TRUE(torch::equal(sharded.full_parameters()[0].second, values));
    load_at_once(sharded, folder.file("complex"));
    EXPECT_TRUE(torch::equal(sharded.full_parameters()[0].second, narrow.to(torch::kComplexDouble)));
    expect_words(refusal<ConfigError>([&] { load_at_once(sharded, folder.file("real")); }),
                 {"'t'", "C64", "[5, 3, 2] of reals"});
  });
}

TEST(LoadRefuses, TiedTensorsThatDiffer) {
  const TestFolder folder;
  const Tensor values = torch::arange(35.0).view({5, 7});
  Tensor other = values.clone();
  other[4][6] = 0;  // in the last rank's part
  write_safetensors(folder.file("values"), {{"t", values}, {"other.t", other}});
  write_safetensors(folder.file("types"), {{"t", values}, {"other.t", values.to(torch::kDouble)}});
  for_every_placement([&](const World& world, const Placements& placements) {
    const auto net = filled([](FilledImpl& filled) {
      const auto t = filled.parameter("t", torch::zeros({5, 7}));
      filled.register_module("other", std::make_shared<FilledImpl>([&](FilledImpl& again) { again.parameter("t", t); }));
    })();
    auto sharded = fully_shard(*net, mesh_for(world, placements), {.placements = placements});
    expect_words(refusal<ConfigError>([&] { load_at_once(sharded, folder.file("values")); }), {"'t'", "'other.t'", "untie"});
    expect_words(refusal<ConfigError>([&] { load_at_once(sharded, folder.file("types")); }), {"'t'", "'other.t'", "types"});
    EXPECT_TRUE(torch::equal(sharded.full_parameters()[0].second, torch::zeros({5, 7})));
  });
}

// ---- errors on one rank, and ranks that differ -----------------------------------------------------------------------

TEST(LoadRefuses, WhatIsWrongOnOneRankIsAnErrorOnAll) {
  const TestFolder folder;
  write_safetensors(folder.file("good"), net_s_values(5));
  write_bytes(folder.file("damaged"), "{}");
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        Refusing refusing(world, placements);
        const int last = world.size - 1;
        const auto mine = [&](const char* name) { return folder.file(world.rank.value == last ? name : "good"); };
        const std::string who = text("rank ", last, ": ");
        refusing.expect<DataError>(mine("none"), {who, folder.file("none"), "No such file"});
        refusing.expect<DataError>(mine("damaged"), {who, folder.file("damaged"), "2 bytes"});
        const auto failing = [&](const std::string& name) {
          if (world.rank.value == last) throw std::runtime_error("no name for " + name);
          return name;
        };
        refusing.expect<Error>(folder.file("good"), {who, "no name for first.weight"}, {.rename = failing});
        refusing.expect<DataError>(folder.file("damaged"), {"file", "2 bytes"});
        load_at_once(refusing.sharded, folder.file("good"));
        expect_equal(net_s_values(5), whole(refusing.sharded, *refusing.net));
      },
      {2, 3});
}

TEST(LoadRefuses, RanksWithDifferentFilesOrOptions) {
  const TestFolder folder;
  auto more = net_s_values(5);
  write_safetensors(folder.file("good"), more);
  write_safetensors(folder.file("step"), net_s_values(6));
  more["more"] = torch::zeros({1});
  write_safetensors(folder.file("more"), more);
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        Refusing refusing(world, placements);
        const auto mine = [&](const char* name) { return folder.file(world.rank.value == 1 ? name : "good"); };
        refusing.expect<AgreementError>(mine("step"),
                                        {"rank 1", folder.file("step"), folder.file("good"), "not the same bytes"});
        refusing.expect<AgreementError>(mine("more"), {"rank 1", folder.file("more"), "header", "same files"},
                                        {.strict = false});
        const auto rename = [&](const std::string& name) {
          return world.rank.value == 1 && name == "first.bias" ? "middle.bias" : name;
        };
        refusing.expect<AgreementError>(folder.file("good"), {"rank 1", "'first.bias' is tensor 'middle.bias'"},
                                        {.strict = false, .rename = rename});
      },
      {2, 3});
}

TEST(LoadRefuses, InScopesAndWhereAParameterWasReplaced) {
  const TestFolder folder;
  write_safetensors(folder.file("x"), net_s_values(5));
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        Refusing refusing(world, placements);
        {
          std::optional<Sharded::Gathered> scope;
          if (world.rank.value == 1) scope.emplace(refusing.sharded.engine(), std::vector<uint32_t>{0});
          refusing.expect<GuardError>(folder.file("x"), {"rank 1: load_at_once", "scope"});
        }
        std::string words;
        auto output = refusing.net(input_rows(0, 0, 2, 6));
        output.register_hook(
            [&](const Tensor&) { words = refusal<GuardError>([&] { load_at_once(refusing.sharded, folder.file("x")); }); });
        output.sum().backward();
        expect_words(words, {"load_at_once", "inside backward"});
        if (world.rank.value == 1) refusing.net->last->bias.set_data(torch::zeros({3}));
        expect_words(refusal<GuardError>([&] { load_at_once(refusing.sharded, folder.file("x")); }),
                     {"rank 1", "'last.bias'"});
      },
      {2});
}

// What was written to parameters and saved for a backward is told by autograd, as after load_parameters.
TEST(LoadRefuses, ABackwardThroughValuesThatWereReplaced) {
  const TestFolder folder;
  write_safetensors(folder.file("x"), net_s_values(5));
  on_ranks(2, [&](World world) {
    Refusing refusing(world, zero3());
    const auto loss = net_s_loss(refusing.net, world, 0);
    load_at_once(refusing.sharded, folder.file("x"));
    expect_words(refusal<c10::Error>([&] { loss.backward(); }), {"modified by an inplace operation"});
  });
}

// The file is cut when all ranks have opened it, before they read.
TEST(LoadRefuses, AFileThatIsCutMeanwhile) {
  const auto wanted = net_s_values(5);
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        auto net = common_net();
        auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
        auto& communicator = sharded.engine().communicator();
        const auto path = std::filesystem::temp_directory_path() / text("tessera-cut-", getppid());
        if (world.rank.value == 0) write_safetensors(path, wanted);
        communicator.barrier("written");
        bool cut = false;
        const auto rename = [&](const std::string& name) {
          if (std::exchange(cut, true)) return name;
          communicator.barrier("opened");
          if (world.rank.value == 0) std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4);
          communicator.barrier("cut");
          return name;
        };
        const auto words = refusal<DataError>([&] { load_at_once(sharded, path, {.rename = rename}); });
        expect_words(words, {path, "changed meanwhile", "some parameters and buffers have the files' values now"});
        if (world.rank.value == 0) write_safetensors(path, wanted);
        communicator.barrier("written");
        load_at_once(sharded, path);
        expect_equal(wanted, whole(sharded, *net));
        communicator.barrier("read");
        if (world.rank.value == 0) std::filesystem::remove(path);
      },
      {1, 2, 3});
}

}  // namespace
}  // namespace tessera::test
