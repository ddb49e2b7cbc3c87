// Models that read their values from safetensors files, each rank its own part, against the whole values.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "models/llama.h"
#include "tessera/base/text.h"
#include "tessera/engine/parts.h"
#include "tests/support/cases.h"
#include "tests/support/deferred_helpers.h"
#include "tests/support/draws.h"
#include "tests/support/on_ranks.h"
#include "tests/support/random_net.h"
#include "tests/support/safetensors_bytes.h"
#include "tests/support/safetensors_writer.h"
#include "tests/support/test_folder.h"

namespace tessera::test {
namespace {

using torch::Tensor;

/// Odd shapes, one of each kind of parameter and buffer; the values follow from `seed`.
Build zoo(int64_t seed) {
  return filled([seed](FilledImpl& net) {
    torch::manual_seed(seed);
    const auto tied = net.parameter("tied", torch::randn({5, 7}));
    net.parameter("cube", torch::randn({3, 4, 2}));
    net.parameter("bias", torch::randn({7}));
    net.parameter("scalar", torch::randn({}));
    net.parameter("empty", torch::randn({0, 3}));
    net.parameter("transposed", torch::randn({6, 4}).t());
    net.parameter("frozen", torch::randn({3, 3}), false);
    net.parameter("integer", torch::randint(1000, {11}, torch::kLong), false);
    net.parameter("flags", torch::rand({9}).lt(0.5), false);
    net.parameter("wide", torch::randn({2, 3}, torch::kDouble));
    net.parameter("pairs", torch::randn({3, 2}, torch::kComplexFloat));
    net.register_module("other", std::make_shared<FilledImpl>([&](FilledImpl& other) { other.parameter("again", tied); }));
    net.buffer("mean", torch::randn({5}));
    net.buffer("count", torch::randint(1000, {}, torch::kLong));
    net.buffer("mask", torch::rand({3, 3}).lt(0.5));
    net.buffer("turned", torch::randn({4, 3}).t());
    net.buffer("phase", torch::randn({2}, torch::kComplexFloat));
  });
}

/// What a file of the module holds: tied ones once, floating-point values as `type`.
Named in_file(const torch::nn::Module& module, torch::Dtype type) {
  Named tensors = registered(module);
  tensors.erase("other.again");
  for (auto& [name, tensor] : tensors)
    if (tensor.is_floating_point()) tensor = tensor.to(type);
  return tensors;
}

/// The sharded model has the values of these tensors: working parameters and buffers, and in the master parameters all
/// digits.
void expect_loaded(const Sharded& sharded, const torch::nn::Module& module, const Named& tensors) {
  for (const auto& [name, value] : whole(sharded, module))
    if (const auto found = tensors.find(name); found != tensors.end()) {
      const Tensor wanted = torch::empty_like(value, torch::MemoryFormat::Contiguous).copy_(found->second);
      EXPECT_TRUE(same_bits(value.contiguous(), wanted)) << name;
    }
  for (const auto& [name, shard] : sharded.named_parameters())
    if (const auto found = tensors.find(name); found != tensors.end()) {
      const Tensor part = sharded.local_of(name, found->second).to(shard.scalar_type());
      EXPECT_TRUE(same_bits(shard.detach().contiguous(), part)) << "the shard of " << name;
    }
}

const std::vector<LayoutKind> kLayouts{flat(),   per_parameter(),   per_parameter(1), per_parameter(-1),
                                       block(3), whole_parameters()};

TEST(Load, EveryPlacementLayoutAndTypeHasTheBitsOfTheFile) {
  const TestFolder folder;
  const std::pair<torch::Dtype, std::optional<torch::Dtype>> kTypes[] = {{torch::kFloat, {}},
                                                                         {torch::kFloat, torch::kFloat},
                                                                         {torch::kDouble, {}},
                                                                         {torch::kBFloat16, torch::kDouble},
                                                                         {torch::kHalf, {}}};
  const auto plain = zoo(1)();
  for (const auto& [type, working] : kTypes) write_safetensors(folder.file(c10::toString(type)), in_file(*plain, type));
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        for (const auto& layout : kLayouts)
          for (const auto& [type, working] : kTypes) {
            SCOPED_TRACE(text(name_of(layout), " from ", c10::toString(type)));
            const auto net = zoo(2)();
            ShardOptions options{.placements = placements, .layouts = {{"*", layout}}};
            options.precision.working = working;
            auto sharded = fully_shard(*net, mesh_for(world, placements), options);
            sharded.full_parameters();  // gathers, and fetches from other copies, the old values
            const auto report = load_at_once(sharded, folder.file(c10::toString(type)));
            EXPECT_EQ(report.tensors, 16);
            EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
            expect_loaded(sharded, *net, in_file(*plain, type));
            if (testing::Test::HasFailure()) return;
          }
      },
      {1, 2, 3, 4});
}

TEST(Load, SixteenBitParametersKeepAllDigitsInTheMaster) {
  const TestFolder folder;
  const auto fill = [](int64_t seed) {
    return filled([seed](FilledImpl& net) {
      torch::manual_seed(seed);
      net.parameter("a", torch::randn({5, 7}));
      net.parameter("b", torch::randn({3}));
    });
  };
  const auto plain = fill(1)();
  for (const auto type : {torch::kFloat, torch::kDouble})
    write_safetensors(folder.file(c10::toString(type)), in_file(*plain, type));
  for_every_placement([&](const World& world, const Placements& placements) {
    for (const auto working : {torch::kBFloat16, torch::kHalf})
      for (const auto type : {torch::kFloat, torch::kDouble})
        for (const auto& layout : kLayouts) {
          const auto net = fill(2)();
          ShardOptions options{.placements = placements, .layouts = {{"*", layout}}};
          options.precision.working = working;
          auto sharded = fully_shard(*net, mesh_for(world, placements), options);
          load_at_once(sharded, folder.file(c10::toString(type)));
          expect_loaded(sharded, *net, in_file(*plain, type));
        }
  });
}

models::LlamaConfig llama_config(int64_t vocab, bool tied) {
  return {.layers = 3, .width = 16, .heads = 4, .kv_heads = 2, .hidden = 24, .vocab = vocab, .context = 8, .tied = tied};
}

// ---- what is read --------------------------------------------------------------------------------------------------

/// What all ranks together read.
int64_t read_together(const Sharded& sharded, const LoadReport& report) {
  int64_t sum = 0;
  for (const auto& bytes : sharded.engine().communicator().all_gather("bytes", std::to_string(report.read.value)))
    sum += std::stoll(bytes);
  return sum;
}

/// Bytes of this rank's parts of the master parameters, in fp32.
int64_t bytes_of_parts(const Sharded& sharded) {
  int64_t bytes = 0;
  for (const auto& shard : sharded.parameters()) bytes += shard.numel() * 4;
  return bytes;
}

TEST(Load, EachRankReadsItsPartAndNoMore) {
  const TestFolder folder;
  torch::manual_seed(1);
  const auto config = llama_config(41, false);
  const int64_t data = write_safetensors(folder.file("x"), registered(*models::Llama(config)));
  for_every_placement(
      [&](const World& world, const Placements& placements) {
        for (const auto& layout : {flat(), per_parameter(), block(7), whole_parameters()}) {
          models::Llama net(config);
          auto sharded = fully_shard(net, mesh_for(world, placements),
                                     {.placements = placements,
                                      .units = units_of<models::LlamaBlockImpl>(),
                                      .layouts = {{"*", layout}},
                                      .initial = Initial::broadcast});
          const auto report = load_at_once(sharded, folder.file("x"));
          EXPECT_EQ(report.read.value, bytes_of_parts(sharded));
          EXPECT_LE(report.reads, report.tensors);
          const bool divided_by_all = placements.optimizer == Placement::sharded &&
                                      (placements.shard_axis.empty() || placements.optimizer_over_both);
          if (divided_by_all) {
            EXPECT_EQ(read_together(sharded, report), data);
          }
          if (placements == ddp()) {
            EXPECT_EQ(report.read.value, data);
          }
        }
      },
      {1, 2, 3, 4});
}

TEST(Load, PartsOfMoreThanAWindow) {
  const TestFolder folder;
  torch::manual_seed(1);
  const Named tensors{{"a", torch::randn({1500, 1601})}, {"b", torch::randn({3'000'000})}, {"c", torch::randn({3})}};
  write_safetensors(folder.file("x"), tensors);
  on_ranks(3, [&](World world) {
    for (const auto& layout : kLayouts) {
      const auto net = filled([](FilledImpl& filled) {
        filled.parameter("b", torch::zeros({3'000'000}));
        filled.parameter("a", torch::zeros({1500, 1601}));
        filled.buffer("c", torch::zeros({3}));
      })();
      auto sharded = fully_shard(*net, Mesh(world), {.layouts = {{"*", layout}}});
      const auto report = load_at_once(sharded, folder.file("x"));
      expect_loaded(sharded, *net, tensors);
      EXPECT_LE(report.reads, 8) << name_of(layout);  // of columns, too
    }
  });
}

// ---- models --------------------------------------------------------------------------------------------------------

TEST(Load, DeferredModelsOfSeveralFiles) {
  for (const bool tied : {false, true}) {
    const TestFolder folder;
    const auto build = [tied] { return models::Llama(llama_config(40, tied)); };
    torch::manual_seed(1);
    const auto wanted = registered(*build());
    write_indexed(folder.path(), wanted, 3);
    for_every_placement([&](const World& world, const Placements& placements) {
      torch::manual_seed(2);
      auto net = deferred(build);
      auto sharded = fully_shard(net, mesh_for(world, placements),
                                 {.placements = placements, .units = units_of<models::LlamaBlockImpl>()});
      load_at_once(sharded, folder.path());
      expect_equal(wanted, whole(sharded, *net));
    });
  }
}

TEST(Load, TrainsOnAsTheUnshardedRunWithTheFilesValues) {
  const TestFolder folder;
  const auto start = [] {
    torch::manual_seed(5);
    return NetS();
  };
  write_safetensors(folder.file("x"), registered(*start()));
  for_every_placement([&](const World& world, const Placements& placements) {
    auto net = common_net(), plain = start();
    auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1)),
        alone(plain->parameters(), torch::optim::SGDOptions(0.1));
    net_s_loss(net, world, 0).backward();  // a step of the old values
    optimizer.step();
    optimizer.zero_grad();
    load_at_once(sharded, folder.file("x"));
    for (int64_t s = 0; s < 3; ++s) {
      net_s_loss(net, world, s).backward();
      net_s_loss(plain, World{}, s).backward();
      for (auto* each : {&optimizer, &alone}) {
        each->step();
        each->zero_grad();
      }
    }
    const auto expected = plain->named_parameters();
    for (const auto& [name, value] : sharded.full_parameters())
      EXPECT_TRUE(torch::allclose(value, expected[name], 1e-5, 1e-6)) << name;
  });
}

// A tensor under one of a parameter's names suffices, and several must be alike.
TEST(Load, TiedParametersUnderAnyOfTheirNames) {
  const TestFolder folder;
  const auto plain = zoo(1)();
  auto first = in_file(*plain, torch::kFloat), second = first, both = first;
  second.erase("tied");
  second["other.again"] = both["other.again"] = first["tied"];
  write_safetensors(folder.file("first"), first);
  write_safetensors(folder.file("second"), second);
  write_safetensors(folder.file("both"), both);
  for_every_placement([&](const World& world, const Placements& placements) {
    for (const char* file : {"first", "second", "both"})
      for (const bool ignored : {false, true}) {
        const auto net = zoo(2)();
        ShardOptions options{.placements = placements};
        if (ignored) options.ignored = {"tied", "cube"};
        auto sharded = fully_shard(*net, mesh_for(world, placements), options);
        const auto report = load_at_once(sharded, folder.file(file));
        EXPECT_EQ(report.tensors, both.size() - (std::string(file) == "both" ? 0 : 1));
        expect_loaded(sharded, *net, first);
        EXPECT_TRUE(torch::equal(net->named_parameters()["other.again"], first["tied"]));
        EXPECT_TRUE(torch::equal(net->named_parameters()["cube"], first["cube"]));
      }
  });
}

TEST(Load, NamesThatDiffer) {
  const TestFolder folder;
  torch::manual_seed(5);
  const NetS plain;
  Named renamed;
  for (const auto& [name, value] : registered(*plain)) renamed["net." + name] = value;
  renamed["more"] = torch::ones({2});
  renamed.erase("net.last.bias");
  write_safetensors(folder.file("x"), renamed);
  const auto rename = [](const std::string& name) { return "net." + name; };
  for_every_placement([&](const World& world, const Placements& placements) {
    for (const bool strict : {false, true}) {
      auto net = common_net();
      auto sharded = fully_shard(net, mesh_for(world, placements), net_s_options(placements));
      LoadOptions options{.strict = strict, .rename = rename};
      if (strict) options.optional = {"mor?", "*.bias"};
      const auto report = load_at_once(sharded, folder.file("x"), options);
      EXPECT_EQ(report.missing, std::vector<std::string>{"last.bias"});
      EXPECT_EQ(report.unexpected, std::vector<std::string>{"more"});
      auto wanted = registered(*plain);
      wanted["last.bias"] = registered(*common_net())["last.bias"];
      expect_equal(wanted, whole(sharded, *net));
    }
  });
}

// A buffer that all ranks have alike is not averaged.
TEST(Load, BuffersKeepTheirBits) {
  const TestFolder folder;
  torch::manual_seed(1);
  const Named tensors{{"weight", torch::randn({6, 3})}, {"table", torch::randn({50}, torch::kDouble)}};
  write_safetensors(folder.file("x"), tensors);
  on_ranks(5, [&](World world) {
    const auto net = filled([](FilledImpl& filled) {
      filled.parameter("weight", torch::zeros({6, 3}));
      filled.buffer("table", torch::zeros({50}, torch::kDouble));
    })();
    auto sharded = fully_shard(*net, Mesh(world));
    AdamW optimizer(sharded, {});
    load_at_once(sharded, folder.file("x"));
    net->parameters()[0].sum().backward();
    optimizer.step();
    EXPECT_TRUE(same_bits(net->buffers()[0], tensors.at("table")));
  });
}

// ---- random nets ---------------------------------------------------------------------------------------------------

struct Draw {
  explicit Draw(uint64_t drawn) : seed(drawn) {
    std::mt19937_64 random(seed);
    const auto draw = [&](size_t count) { return random() % count; };
    ranks = 1 + static_cast<int>(draw(4));
    options.placements = every_placement()[draw(6)];
    options.layouts = {{"*weight", kLayouts[draw(kLayouts.size())]}, {"*", kLayouts[draw(kLayouts.size())]}};
    const std::optional<torch::Dtype> kWorking[] = {{}, torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf};
    options.precision.working = kWorking[draw(5)];
    if (draw(3) == 0) options.resident_below = 30;
    net.type = draw(2) == 0 ? torch::kDouble : torch::kFloat;
    const torch::Dtype kTypes[] = {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf};
    type = kTypes[draw(4)];
    files = 1 + draw(3);
    deferred = draw(2) == 0;
  }
  std::string description() const {
    return text("TESSERA_TEST_SEED=", seed, ": ", ranks, " ranks, ", name_of(options.placements), ", weights ",
                name_of(options.layouts[0].layout), ", others ", name_of(options.layouts[1].layout), ", ", files,
                " files of ", c10::toString(type), deferred ? ", deferred" : "");
  }
  Named tensors() const {
    Named all;
    for (const auto& [name, value] : RandomNet(seed, net)->unique_parameters()) all[name] = value.detach().to(type);
    return all;
  }

  uint64_t seed;
  int ranks;
  ShardOptions options;
  RandomNetOptions net;
  torch::Dtype type;
  size_t files;
  bool deferred;
};

TEST(Load, RandomNets) {
  for_each_draw<Draw>(25, [](const Draw& draw, const World& world) {
    const TestFolder folder;
    const auto tensors = draw.tensors();
    write_indexed(folder.path(), tensors, draw.files);
    const auto build = [&] {
      RandomNet net(draw.seed, draw.net);
      const torch::NoGradGuard no_grad;
      for (auto& [name, value] : net->unique_parameters()) value.zero_();
      return net;
    };
    auto net = draw.deferred ? deferred(build) : build();
    auto options = draw.options;
    options.layouts[0].pattern = "*t";  // every net has a head.weight
    auto sharded = fully_shard(net, mesh_for(world, options.placements), options);
    load_at_once(sharded, folder.path());
    expect_loaded(sharded, *net, tensors);
  });
}

}  // namespace
}  // namespace tessera::test
