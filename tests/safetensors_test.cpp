// Files in the safetensors format: what is read as specified, what is refused, in how many calls.
#include "tessera/checkpoint/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <map>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/safetensors_reader.h"
#include "tests/support/refusal.h"
#include "tests/support/safetensors_bytes.h"
#include "tests/support/test_folder.h"

namespace tessera::test {
namespace {

std::string bytes_between(const SafetensorsFile& file, int64_t begin, int64_t end) {
  std::string bytes(static_cast<size_t>(end - begin), '?');
  file.read(begin, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

// Written out byte by byte, by the format's description alone: a header of 0x90 bytes, padded with spaces, and 16 of data.
TEST(Safetensors, AFileWrittenByHandIsReadAsSpecified) {
  const TestFolder folder;
  constexpr char kFile[] =
      "\x90\0\0\0\0\0\0\0"
      R"({"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
      R"("n":{"dtype":"I64","shape":[],"data_offsets":[8,16]} }   )"
      "\x00\x00\xc0\x3f"                  // 1.5
      "\x00\x00\x00\xc0"                  // -2
      "\xfd\xff\xff\xff\xff\xff\xff\xff"  // -3
      ;
  const std::string bytes(kFile, sizeof kFile - 1);
  ASSERT_EQ(bytes.size(), 8u + 0x90 + 16);
  write_bytes(folder.file("x.safetensors"), bytes);
  const SafetensorsFile file(folder.file("x.safetensors"));
  ASSERT_EQ(file.tensors().size(), 2u);
  const auto &w = file.tensors()[0], &n = file.tensors()[1];
  EXPECT_EQ(w.name, "w");
  EXPECT_EQ(w.type, FileType::f32);
  EXPECT_EQ(w.shape, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(n.name, "n");
  EXPECT_EQ(n.type, FileType::i64);
  EXPECT_TRUE(n.shape.empty());
  float values[2];
  std::memcpy(values, bytes_between(file, w.begin, w.end).data(), sizeof values);
  EXPECT_EQ(values[0], 1.5f);
  EXPECT_EQ(values[1], -2.0f);
  int64_t number = 0;
  std::memcpy(&number, bytes_between(file, n.begin, n.end).data(), sizeof number);
  EXPECT_EQ(number, -3);
}

TEST(Safetensors, EveryTypeHasItsNameAndSize) {
  const std::pair<const char*, int> kKnown[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
                                                {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},     {"BF16", 2},
                                                {"I32", 4},     {"U32", 4}, {"F32", 4}, {"C64", 8},     {"F64", 8},
                                                {"I64", 8},     {"U64", 8}};
  const TestFolder folder;
  for (const auto& [name, size] : kKnown) {
    write_bytes(folder.file("x"),
                safetensors_bytes(text(R"({"t":{"dtype":")", name, R"(","shape":[3],"data_offsets":[0,)", 3 * size, "]}}"),
                                  std::string(static_cast<size_t>(3 * size), 'x')));
    const SafetensorsFile file(folder.file("x"));
    EXPECT_EQ(name_of(file.tensors()[0].type), name);
    EXPECT_EQ(bytes_of(file.tensors()[0].type), size);
  }
}

TEST(Safetensors, FilesWithoutTensorsAndTensorsWithoutElements) {
  const TestFolder folder;
  write_bytes(folder.file("none"), safetensors_bytes("{}      ", ""));
  EXPECT_TRUE(SafetensorsFile(folder.file("none")).tensors().empty());
  write_bytes(folder.file("empty"), safetensors_bytes(R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                                      R"("a":{"dtype":"F32","shape":[0,5],"data_offsets":[4,4]},)"
                                                      R"("c":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
                                                      "1234"));
  const SafetensorsFile file(folder.file("empty"));
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.tensors()[0].name, "c");
  EXPECT_EQ(file.tensors()[2].name, "a");
}

TEST(Safetensors, MalformedFilesAreRefusedWithTheReason) {
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return text(R"({"a":{"dtype":)", dtype, R"(,"shape":)", shape, R"(,"data_offsets":)", offsets, "}}");
  };
  const auto two = [](const std::string& a, const std::string& b) {
    return text(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)", a, R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)",
                b, "}}");
  };
  const auto good = one(R"("F32")", "[2]", "[0,8]");
  const std::string data(8, 'd');
  struct Case {
    std::string bytes;
    std::vector<std::string> words;
  };
  const Case kCases[] = {
      {"", {"0 bytes", "fewer than the 8"}},
      {"1234567", {"7 bytes"}},
      {std::string("\xff\0\0\0\0\0\0\0{}", 10), {"255 bytes", "only 2 follow"}},
      {std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10), {"18446744073709551615 bytes", "100000000 is the most"}},
      {std::string("\0\0\0\0\0\0\0\0", 8), {"does not begin with {"}},
      {safetensors_bytes(" " + good, data), {"does not begin with {"}},
      {safetensors_bytes("[]", ""), {"does not begin with {"}},
      {safetensors_bytes("{\"a\":", ""), {"no JSON", "column 6"}},
      {safetensors_bytes("{} x", ""), {"no JSON"}},
      {safetensors_bytes("{\"\xff\":1}", ""), {"no JSON"}},
      {safetensors_bytes(std::string(100'000, '{'), ""), {"no JSON"}},
      {safetensors_bytes("{\"a\":" + std::string(100'000, '['), ""), {"no JSON"}},
      {safetensors_bytes(R"({"a":1})", ""), {"'a'", "lacks a dtype"}},
      {safetensors_bytes(R"({"a":{}})", ""), {"'a'", "lacks a dtype"}},
      {safetensors_bytes(R"({"__metadata__":{"step":3}})", ""), {"__metadata__"}},
      {safetensors_bytes(one(R"("F4")", "[2]", "[0,1]"), "x"), {"'a'", "'F4'", "can't be read"}},
      {safetensors_bytes(one("3", "[2]", "[0,8]"), data), {"'a'", "dtype"}},
      {safetensors_bytes(one(R"("F32")", "[-2]", "[0,8]"), data), {"'a'", "no counts"}},
      {safetensors_bytes(one(R"("F32")", "[2.0]", "[0,8]"), data), {"'a'", "no counts"}},
      {safetensors_bytes(one(R"("F32")", "2", "[0,8]"), data), {"'a'", "no counts"}},
      {safetensors_bytes(one(R"("F32")", "[2]", "[0]"), data), {"'a'", "two data_offsets"}},
      {safetensors_bytes(one(R"("F32")", "[2]", "[0,4,8]"), data), {"'a'", "two data_offsets"}},
      {safetensors_bytes(one(R"("F32")", "[2]", "[0,18446744073709551616]"), data), {"'a'", "no counts"}},
      {safetensors_bytes(one(R"("F32")", "[2]", "[0,9223372036854775808]"), data), {"'a'", "no counts"}},
      {safetensors_bytes(one(R"("F32")", "[2]", "[8,0]"), data), {"'a'", "bytes 8 to 0 of 8"}},
      {safetensors_bytes(one(R"("F32")", "[2]", "[1,9]"), data), {"'a'", "bytes 1 to 9 of 8"}},
      {safetensors_bytes(one(R"("F32")", "[3]", "[0,8]"), data), {"'a'", "8 bytes", "F32 [3] has 12"}},
      {safetensors_bytes(one(R"("F32")", "[4294967296,4294967296]", "[0,0]"), ""), {"'a'", "more than can be counted"}},
      {safetensors_bytes(one(R"("F32")", "[4611686018427387904]", "[0,0]"), ""), {"'a'", "more than can be counted"}},
      {safetensors_bytes(good, data + "x"), {"end at byte", "but it has"}},
      {safetensors_bytes(good, "1234567"), {"bytes 0 to 8 of 7"}},
      {safetensors_bytes(two("[0,4]", "[2,6]"), data), {"'b'", "begins at byte 2", "ends at 4"}},
      {safetensors_bytes(two("[0,4]", "[0,4]"), "1234"), {"begins at byte 0", "ends at 4"}},
      {safetensors_bytes(two("[0,4]", "[5,9]"), "123456789"), {"'b'", "begins at byte 5", "ends at 4"}},
      {safetensors_bytes(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                         R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                         "x"),
       {"'a'", "twice"}},
      {safetensors_bytes(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "x"),
       {"'dtype'", "twice"}},
  };
  const TestFolder folder;
  const auto path = folder.file("broken.safetensors");
  for (const auto& [bytes, words] : kCases) {
    SCOPED_TRACE(bytes.substr(0, 200));
    write_bytes(path, bytes);
    const auto error = refusal<DataError>([&] { SafetensorsFile file(path); });
    expect_words(error, words);
    expect_words(error, {path});
  }
}

TEST(Safetensors, WhatIsNoFileIsRefusedAtOnce) {
  const TestFolder folder;
  expect_words(refusal<DataError>([&] { SafetensorsFile file(folder.file("none")); }), {"none", "No such file"});
  expect_words(refusal<DataError>([&] { SafetensorsFile file(folder.path()); }), {"not a regular file"});
  ASSERT_EQ(mkfifo(folder.file("pipe").c_str(), 0600), 0);
  expect_words(refusal<DataError>([&] { SafetensorsFile file(folder.file("pipe")); }), {"pipe", "not a regular file"});
}

TEST(Safetensors, AFileThatShrinksIsAnErrorOfReading) {
  const TestFolder folder;
  const auto path = folder.file("x");
  write_bytes(path, safetensors_bytes(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "1234"));
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, static_cast<uintmax_t>(file.data_begin()) + 2);
  expect_words(refusal<DataError>([&] { bytes_between(file, file.data_begin(), file.bytes()); }),
               {path, "changed meanwhile"});
  EXPECT_EQ(bytes_between(file, file.data_begin(), file.data_begin() + 2), "12");
}

// ---- several files -------------------------------------------------------------------------------------------------

/// A file with one tensor of type U8.
std::string with_tensor(const std::string& name, const std::string& data) {
  return safetensors_bytes(
      text("{\"", name, R"(":{"dtype":"U8","shape":[)", data.size(), R"(],"data_offsets":[0,)", data.size(), "]}}"), data);
}

std::vector<std::string> names_of(const SafetensorsSet& set) {
  std::vector<std::string> names;
  for (const auto& entry : set.tensors()) names.push_back(entry.tensor->name);
  return names;
}

TEST(SafetensorsSet, AFolderIsItsIndexOrElseAllItsFiles) {
  using Names = std::vector<std::string>;
  const TestFolder folder;
  write_bytes(folder.file("2.safetensors"), with_tensor("a", "aa"));
  write_bytes(folder.file("1.safetensors"), with_tensor("b", "b"));
  write_bytes(folder.file("notes.txt"), "not of these");
  EXPECT_EQ(names_of(SafetensorsSet(folder.path())), (Names{"a", "b"}));
  EXPECT_EQ(names_of(SafetensorsSet(folder.file("1.safetensors"))), (Names{"b"}));
  const auto index = folder.file("model.safetensors.index.json");
  write_bytes(index, R"({"metadata":{},"weight_map":{"a":"2.safetensors"}})");
  for (const auto& path : {folder.path(), std::filesystem::path(index)}) {
    const SafetensorsSet set(path);
    EXPECT_EQ(names_of(set), (Names{"a"}));
    ASSERT_NE(set.find("a"), nullptr);
    EXPECT_EQ(set.find("b"), nullptr);
    EXPECT_EQ(bytes_between(set.files()[set.find("a")->file], set.find("a")->tensor->begin, set.find("a")->tensor->end),
              "aa");
  }
  write_bytes(folder.file("other.safetensors.index.json"), "{}");
  expect_words(refusal<DataError>([&] { SafetensorsSet set(folder.path()); }), {"several indices", "name the one"});
}

TEST(SafetensorsSet, IndicesAndFoldersThatDoNotFitAreRefused) {
  const TestFolder folder;
  expect_words(refusal<DataError>([&] { SafetensorsSet set(folder.path()); }), {folder.path(), "no file *.safetensors"});
  write_bytes(folder.file("1.safetensors"), with_tensor("a", "a"));
  const auto index = folder.file("x.safetensors.index.json");
  const std::pair<const char*, std::vector<std::string>> kCases[] = {
      {"", {"no JSON"}},
      {"[]", {"no JSON object"}},
      {"{}", {"weight_map"}},
      {R"({"weight_map":[]})", {"weight_map"}},
      {R"({"weight_map":{"a":1}})", {"'a'", "no string"}},
      {R"({"weight_map":{"a":"/etc/passwd"}})", {"'a'", "/etc/passwd", "outside"}},
      {R"({"weight_map":{"a":"../1.safetensors"}})", {"'a'", "outside"}},
      {R"({"weight_map":{"a":"1.safetensors","a":"1.safetensors"}})", {"'a'", "twice"}},
      {R"({"weight_map":{"a":"2.safetensors"}})", {"2.safetensors", "No such file"}},
      {R"({"weight_map":{"a":"1.safetensors","b":"1.safetensors"}})", {"'b'", "1.safetensors", "lacks it"}},
  };
  for (const auto& [bytes, words] : kCases) {
    SCOPED_TRACE(bytes);
    write_bytes(index, bytes);
    expect_words(refusal<DataError>([&] { SafetensorsSet set(index); }), words);
  }
  std::filesystem::remove(index);
  write_bytes(folder.file("2.safetensors"), with_tensor("a", "b"));
  expect_words(refusal<DataError>([&] { SafetensorsSet set(folder.path()); }), {"'a'", "1.safetensors", "2.safetensors"});
}

// ---- reading runs --------------------------------------------------------------------------------------------------

constexpr int64_t kK = 1024;

using Elements = std::vector<tessera::Run>;

/// Tensors of type I16 and U8 whose bytes are a pattern, and what a reader of some runs gives.
struct Runs {
  Runs() {
    data.resize(9'000 * kK);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 7 + i / 251);
    write_bytes(
        folder.file("x"),
        safetensors_bytes(text(R"({"a":{"dtype":"I16","shape":[)", 2'000 * kK, R"(],"data_offsets":[0,)", 4'000 * kK,
                               R"(]},"b":{"dtype":"U8","shape":[)", 5'000 * kK - 1, R"(],"data_offsets":[)", 4'000 * kK, ",",
                               9'000 * kK - 1, R"(]},"c":{"dtype":"U8","shape":[1],"data_offsets":[)", 9'000 * kK - 1, ",",
                               9'000 * kK, "]}}"),
                          data));
  }
  struct Given {
    int64_t reads, bytes;
  };
  /// Reads `runs` of each tensor, `budget` bytes at a time, and expects that each gets its elements in order.
  Given read(const std::map<std::string, Elements>& runs, Bytes budget = Bytes(1 << 30)) {
    const SafetensorsSet set(folder.file("x"));
    std::vector<SafetensorsReader::Source> sources;
    std::vector<std::string> wanted, got;
    for (const auto& [name, of] : runs) {
      sources.push_back({*set.find(name), of});
      const auto& tensor = *set.find(name)->tensor;
      const int64_t size = bytes_of(tensor.type), begin = tensor.begin - set.files()[0].data_begin();
      wanted.emplace_back();
      for (const auto& run : of)
        wanted.back() += data.substr(static_cast<size_t>(begin + run.begin * size), static_cast<size_t>(run.count * size));
    }
    got.resize(sources.size());
    const auto names = sources;
    SafetensorsReader reader(set, std::move(sources));
    for (int64_t before = -1; before != reader.read_bytes().value;) {
      before = reader.read_bytes().value;
      reader.read(budget, [&](size_t source, int64_t first, int64_t count, std::byte* at) {
        const int64_t size = bytes_of(names[source].entry.tensor->type);
        EXPECT_EQ(static_cast<int64_t>(got[source].size()), first * size);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(size), 0u);
        got[source].append(reinterpret_cast<const char*>(at), static_cast<size_t>(count * size));
      });
    }
    EXPECT_TRUE(wanted == got);
    return {reader.reads(), reader.read_bytes().value};
  }
  TestFolder folder;
  std::string data;
};

void expect_given(const Runs::Given& given, int64_t reads, int64_t bytes) {
  EXPECT_EQ(given.reads, reads);
  EXPECT_EQ(given.bytes, bytes);
}

TEST(SafetensorsReader, RunsThatTouchAreOneCall) {
  Runs runs;
  expect_given(runs.read({{"a", {{10, 5, 0}}}}), 1, 10);
  expect_given(runs.read({{"a", {{10, 5, 0}, {15, 5, 5}}}}), 1, 20);
  const Elements last{{2'000 * kK - 3, 3, 0}}, first{{0, 4, 0}};
  expect_given(runs.read({{"a", last}, {"b", first}}), 1, 10);
  expect_given(runs.read({}), 0, 0);
  expect_given(runs.read({{"a", {}}}), 0, 0);
}

TEST(SafetensorsReader, GapsAreReadOnlyInsideATensorAndWhereThatIsCheap) {
  Runs runs;
  expect_given(runs.read({{"a", {{0, 5, 0}, {5 + 8 * kK, 5, 5}}}}), 1, 20 + 16 * kK);
  expect_given(runs.read({{"a", {{0, 5, 0}, {6 + 8 * kK, 5, 5}}}}), 2, 20);
  const Elements last{{2'000 * kK - 3, 3, 0}}, later{{1, 4, 0}};
  expect_given(runs.read({{"a", last}, {"b", later}}), 2, 10);
}

TEST(SafetensorsReader, LongRunsAreReadInWindows) {
  Runs runs;
  const Elements a{{0, 2'000 * kK, 0}}, b{{0, 5'000 * kK - 1, 0}}, c{{0, 1, 0}};
  expect_given(runs.read({{"a", a}, {"b", b}, {"c", c}}), 2, 9'000 * kK);
  expect_given(runs.read({{"a", a}, {"b", b}, {"c", c}}, Bytes(1)), 2, 9'000 * kK);
  Elements striped;
  for (int64_t i = 0; i < 200 * kK; ++i) striped.push_back({i * 10 + 1, 3, i * 3});
  const auto given = runs.read({{"a", striped}, {"b", b}});
  EXPECT_EQ(given.reads, 5);  // of 65,536 pieces at most
  EXPECT_LT(given.bytes, 9'000 * kK);
}

TEST(SafetensorsReader, AnElementIsNeverReadAcrossItsAlignment) {
  const TestFolder folder;
  write_bytes(folder.file("x"), safetensors_bytes(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                                                  R"("b":{"dtype":"I16","shape":[2],"data_offsets":[3,7]}})",
                                                  "abcdefg"));
  const SafetensorsSet set(folder.file("x"));
  SafetensorsReader reader(set, {{*set.find("a"), {{0, 3, 0}}}, {*set.find("b"), {{0, 2, 0}}}});
  std::string got;
  reader.read(Bytes(100), [&](size_t source, int64_t, int64_t count, std::byte* at) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % (source + 1), 0u);
    got.append(reinterpret_cast<const char*>(at), static_cast<size_t>(count) * (source + 1));
  });
  EXPECT_EQ(got, "abcdefg");
  EXPECT_EQ(reader.reads(), 2);
}

}  // namespace
}  // namespace tessera::test
