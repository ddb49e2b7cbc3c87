#include "tessera/layout/partition_spec.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/support/refusal.h"

namespace tessera {
namespace {

using test::expect_words;
using test::refusal;

const std::vector<int64_t> kShape = {6, 5};

Mesh mesh(std::vector<Axis> axes) {
  int size = 1;
  for (const auto& axis : axes) size *= axis.size;
  return {World{.size = size, .local_size = size}, std::move(axes)};
}

std::string rule(const PartitionSpec& spec, const PartitionSpec& state, const Mesh& over) {
  const Rule found = rule_of("w", kShape, spec, state, over);
  return name_of(found.placements) + " " + name_of(found.layout);
}

TEST(PartitionSpec, Prints) {
  EXPECT_EQ(name_of(P()), "P()");
  EXPECT_EQ(name_of(P("data")), "P(data)");
  EXPECT_EQ(name_of(P(std::nullopt, "data")), "P(null, data)");
  EXPECT_EQ(name_of(P({"a", "b"}, std::nullopt, "c")), "P(a x b, null, c)");
  EXPECT_EQ(P("data", std::nullopt), P("data"));
}

TEST(PartitionSpec, OneAxis) {
  const Mesh data = mesh({{"data", 4}});
  EXPECT_EQ(rule(P(), P(), data), "ddp flat");
  EXPECT_EQ(rule(P(), P("data"), data), "zero1 per_parameter(0)");
  EXPECT_EQ(rule(P("data"), P("data"), data), "zero3 per_parameter(0)");
  EXPECT_EQ(rule(P(std::nullopt, "data"), P(std::nullopt, "data"), data), "zero3 per_parameter(1)");
  EXPECT_EQ(rule(P(), P(std::nullopt, "data"), data), "zero1 per_parameter(1)");
}

TEST(PartitionSpec, TwoAxes) {
  const Mesh both = mesh({{"replicate", 2}, {"shard", 3}});
  EXPECT_EQ(rule(P("shard"), P("shard"), both), "hybrid(shard, replicate) per_parameter(0)");
  EXPECT_EQ(rule(P("shard"), P({"shard", "replicate"}), both),
            "hybrid(shard, replicate, optimizer over both) per_parameter(0)");
  EXPECT_EQ(rule(P({"replicate", "shard"}), P({"shard", "replicate"}), both), "zero3 per_parameter(0)");
  EXPECT_EQ(rule(P(), P({"shard", "replicate"}), both), "zero1 per_parameter(0)");
  EXPECT_EQ(rule(P(), P(), both), "ddp flat");
  const Mesh degenerate = mesh({{"replicate", 1}, {"shard", 3}, {"other", 1}});
  EXPECT_EQ(rule(P("shard"), P("shard"), degenerate), "zero3 per_parameter(0)");
  EXPECT_EQ(rule(P("replicate"), P("replicate"), degenerate), "hybrid(replicate, shard) per_parameter(0)");
}

TEST(PartitionSpec, WhatCannotBe) {
  const Mesh both = mesh({{"replicate", 2}, {"shard", 3}});
  const auto refused = [&](const PartitionSpec& spec, const PartitionSpec& state, const Mesh& over) {
    return refusal<ConfigError>([&] { rule(spec, state, over); });
  };
  expect_words(refused(P("data"), P("data"), both), {"'w'", "P(data)", "no axis 'data'", "'replicate' (2), 'shard' (3)"});
  expect_words(refused(P("shard", "shard"), P(), both), {"'w'", "'shard' twice"});
  expect_words(refused(P("shard", "replicate"), P("shard"), both), {"'w'", "one dim only"});
  expect_words(refused(P(), P(std::nullopt, std::nullopt, "shard"), both),
               {"optimizer state of 'w'", "divides dim 2", "2 dims"});
  expect_words(refused(P("shard"), P(), both), {"'w'", "P(shard)", "P()", "state must be divided too"});
  expect_words(refused(P("shard"), P(std::nullopt, "shard"), both), {"'w'", "same dim"});
  expect_words(refused(P(), P("shard"), both), {"'w'", "all axes of the mesh"});
  expect_words(refused(P("shard"), P("replicate"), both), {"'w'", "the axes of the values"});
  const Mesh three = mesh({{"a", 2}, {"b", 2}, {"c", 2}});
  expect_words(refused(P("a"), P("a"), three), {"'w'", "'b'", "'c'"});
  expect_words(refused(P({"a", "b"}), P({"a", "b"}), three), {"'w'", "one axis or over all"});
}

TEST(PartitionSpec, PatternsThatDisagreeOrMatchNothing) {
  AnnotationTable table("values", {{"blocks.*", P("data")}, {"*.weight", P("data")}, {"blocks.0.bias", P()}, {"head", P()}});
  EXPECT_EQ(table.find("blocks.1.weight"), P("data"));
  EXPECT_EQ(table.find("norm"), std::nullopt);
  expect_words(refusal<ConfigError>([&] { table.find("blocks.0.bias"); }),
               {"values of 'blocks.0.bias'", "'blocks.*' says P(data)", "'blocks.0.bias' says P()"});
  expect_words(refusal<ConfigError>([&] { table.refuse_unused(); }), {"'head'", "P()", "values", "no parameter"});
}

}  // namespace
}  // namespace tessera
