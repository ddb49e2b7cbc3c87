#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "models/bigram.h"
#include "models/counter_random.h"
#include "models/synthetic_data.h"
#include "models/text_data.h"
#include "models/text_file.h"
#include "models/text_spans.h"
#include "models/tokenizer.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace {

using namespace tessera;          // NOLINT(google-build-using-namespace): a test
using namespace tessera::models;  // NOLINT(google-build-using-namespace): a test
namespace fs = std::filesystem;

class Folder {
 public:
  Folder() : path_(fs::path(testing::TempDir()) / tessera::text("tessera_data_test.", ::getpid())) {
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  fs::path operator/(const char* name) const { return path_ / name; }
  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
  }
  operator const fs::path&() const { return path_; }

 private:
  fs::path path_;
};

/// Lines of words made of syllables, frequent words and rare ones; always the same.
std::string some_text(size_t lines) {
  static constexpr const char* kSyllables[] = {"the", "an",  "or",  "king", "sha",  "ll", "en",  "ter",
                                               "win", "lo",  "rd",  "un",   "to",   "me", "is",  "glo",
                                               "ri",  "ous", "sum", "mer",  "buri", "ed", "cea", "n"};
  std::string text;
  for (uint64_t line = 0; line < lines; ++line) {
    for (uint64_t i = 0; i < 4 + line % 5; ++i) {
      const auto draw = static_cast<uint64_t>(scale_to(counter_random(1, line, i), 40));
      const uint64_t word = draw * draw / 4;  // 0 … 380
      if (i > 0) text += ' ';
      for (uint64_t part = 0; part < 1 + word % 4; ++part)
        text += kSyllables[scale_to(counter_random(2, word, part), std::ssize(kSyllables))];
    }
    text += ".\n";
  }
  return text;
}

template <class Kind, class Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const Kind& error) {
    return error.what();
  }
  return "no such error";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TextData bytes_of(const std::string& text, int64_t context, uint64_t seed = 0) {
  return {"text", text, byte_tokenizer(), context, seed};
}

TEST(CounterRandom, IsSplitMix64) {
  // The first outputs of the published generator for the seed 0: its state advances by mix's own constant.
  EXPECT_EQ(mix(0), 0xe220a8397b1dcdafULL);
  EXPECT_EQ(mix(0x9e3779b97f4a7c15ULL), 0x6e789e6aa1b965f4ULL);
  EXPECT_EQ(scale_to(0, 10), 0);
  EXPECT_EQ(scale_to(~uint64_t{0}, 10), 9);
}

TEST(TextData, BatchesDoNotDependOnTheNumberOfRanks) {
  const auto data = bytes_of(some_text(100), 16, 5);
  for (const int64_t step : {0, 1, 7}) {
    const auto whole = data.batch(step, Rank(0), 1, 12);
    EXPECT_EQ(whole.sizes().vec(), (std::vector<int64_t>{12, 17}));
    for (const int ranks : {2, 3, 4, 6}) {
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < ranks; ++rank) parts.push_back(data.batch(step, Rank(rank), ranks, 12 / ranks));
      EXPECT_TRUE(at::cat(parts).equal(whole)) << ranks << " ranks, step " << step;
    }
    // Two micro-batches on one rank are one on two.
    EXPECT_TRUE(at::cat({data.batch(2 * step, Rank(0), 1, 6), data.batch(2 * step + 1, Rank(0), 1, 6)}).equal(whole));
  }
}

TEST(TextData, SamplesAreStretchesOfTheTrainingText) {
  const auto data = bytes_of(some_text(100), 16);
  const auto tokens = data.batch(0, Rank(0), 1, 200);
  std::set<size_t> starts;
  for (int64_t i = 0; i < 200; ++i) {
    const auto* sample = tokens[i].const_data_ptr<int64_t>();
    const auto at = data.training_text().find(std::string(sample, sample + 17));
    ASSERT_NE(at, std::string::npos);
    starts.insert(at);
  }
  EXPECT_GT(starts.size(), 150U);
  EXPECT_LT(*starts.begin(), data.training_text().size() / 10);
  EXPECT_GT(*starts.rbegin(), data.training_text().size() * 9 / 10);
}

TEST(TextData, SeedsAndStepsDiffer) {
  const auto text = some_text(100);
  const auto first = bytes_of(text, 16, 0), again = bytes_of(text, 16, 0), other = bytes_of(text, 16, 1);
  EXPECT_TRUE(first.batch(3, Rank(0), 1, 4).equal(again.batch(3, Rank(0), 1, 4)));
  EXPECT_FALSE(first.batch(3, Rank(0), 1, 4).equal(other.batch(3, Rank(0), 1, 4)));
  EXPECT_FALSE(first.batch(3, Rank(0), 1, 4).equal(first.batch(4, Rank(0), 1, 4)));
}

TEST(TextData, HoldsOutTheLastTenthFromALineOn) {
  const auto text = some_text(400);
  const auto data = bytes_of(text, 16);
  EXPECT_EQ(tessera::text(data.training_text(), data.validation_text()), text);
  EXPECT_EQ(data.training_text().back(), '\n');
  EXPECT_NEAR(static_cast<double>(data.training_text().size()) / static_cast<double>(text.size()), 0.9, 0.01);
  EXPECT_EQ(bytes_of(std::string(1000, 'x'), 16).validation_text().size(), 100U);
}

TEST(TextData, ValidationReadsEachTokenOnce) {
  const auto data = bytes_of(some_text(100), 16);
  const auto held_out = data.validation_text();
  ASSERT_EQ(data.validation_samples(), static_cast<int64_t>(held_out.size() - 1) / 16);
  const auto tokens = data.validation_batch(0, data.validation_samples());
  for (int64_t i = 0; i < data.validation_samples(); ++i) {
    const auto* sample = tokens[i].const_data_ptr<int64_t>();
    EXPECT_EQ(std::string(sample, sample + 17), held_out.substr(static_cast<size_t>(i) * 16, 17));
  }
  EXPECT_TRUE(data.validation_batch(2, 3).equal(tokens.narrow(0, 2, 3)));
  EXPECT_THROW(data.validation_batch(data.validation_samples() - 1, 2), ConfigError);
  EXPECT_THROW(data.validation_batch(-1, 2), ConfigError);
  EXPECT_DOUBLE_EQ(data.bytes_per_token(), 1.0);
}

TEST(TextData, RefusesBatchesThatCantBe) {
  const auto data = bytes_of(some_text(100), 16);
  EXPECT_THROW(data.batch(-1, Rank(0), 1, 1), ConfigError);
  EXPECT_THROW(data.batch(0, Rank(2), 2, 1), ConfigError);
  EXPECT_THROW(data.batch(0, Rank(0), 1, 0), ConfigError);
  EXPECT_THROW(bytes_of(some_text(100), 0), ConfigError);
}

TEST(TextData, SaysWhatIsWrongWithAFile) {
  const Folder folder;
  const auto load = [&](const fs::path& file, int64_t context = 16) {
    return message_of<DataError>([&] { TextData::load(file, 256, {}, context, 0); });
  };
  const auto empty = folder / "empty.txt", little = folder / "short.txt", closed = folder / "closed.txt";
  std::ofstream(empty).flush();
  std::ofstream(little) << "0123456789\n";
  EXPECT_TRUE(contains(load(folder / "none.txt"), "none.txt\" can't be opened: "));
  EXPECT_TRUE(contains(load(folder), "is a directory"));
  EXPECT_TRUE(contains(load("/dev/null"), "is not a regular file"));
  EXPECT_TRUE(contains(load(empty), "empty.txt\" is empty"));
  EXPECT_TRUE(contains(
      load(little),
      "short.txt (11 bytes) gives 9 tokens for training and 2 for validation, but a sample of context 16 needs 17"));
  if (::geteuid() == 0) return;  // root reads everything
  std::ofstream(closed) << some_text(10);
  fs::permissions(closed, fs::perms::none);
  EXPECT_TRUE(contains(load(closed), "Permission denied"));
}

TEST(TextFile, IsWrittenWholeOrNotAtAll) {
  const Folder folder;
  write_file(folder / "deep/er/file", "one");
  write_file(folder / "deep/er/file", "two");
  EXPECT_EQ(read_file(folder / "deep/er/file"), "two");
  fs::create_directories(folder / "taken/by");
  EXPECT_TRUE(contains(message_of<SystemError>([&] { write_file(folder / "taken", "three"); }),
                       "taken\" (5 bytes) can't be written: "));
  EXPECT_EQ(folder.files(), 2U);  // no neighbour is left
  if (fs::exists("/dev/full")) {
    fs::create_symlink("/dev/full", folder / tessera::text("full.partial.", ::getpid()).c_str());
    EXPECT_TRUE(contains(message_of<SystemError>([&] { write_file(folder / "full", "four"); }), "No space left on device"));
    EXPECT_EQ(folder.files(), 2U);
  }
}

TEST(TextSpans, KeepWhatSentencepieceWouldChangeOut) {
  const auto spans = [](std::string_view text) {
    std::vector<std::string> result;
    while (!text.empty()) {
      const auto span = first_span(text);
      result.emplace_back(1, span.plain ? '+' : '-');
      result.back() += span.bytes;
      text.remove_prefix(span.bytes.size());
    }
    return result;
  };
  EXPECT_EQ(spans("to be\n\tor"), (std::vector<std::string>{"+to be", "-\n", "-\t", "+or"}));
  EXPECT_EQ(spans("é漢😀"), (std::vector<std::string>{"+é漢😀"}));
  EXPECT_EQ(spans("a\u2581b\u2585"), (std::vector<std::string>{"+a", "-\u2581", "+b", "-\u2585"}));
  EXPECT_EQ(spans("\xc3"), (std::vector<std::string>{"-\xc3"}));                            // cut short
  EXPECT_EQ(spans("\xc0\xaf"), (std::vector<std::string>{"-\xc0", "-\xaf"}));               // too long a way to write '/'
  EXPECT_EQ(spans("\xed\xa0\x80"), (std::vector<std::string>{"-\xed", "-\xa0", "-\x80"}));  // a surrogate
  const auto words = spans(tessera::text(std::string(kLongestSpan - 5, 'x'), ' ', std::string(100, 'y')));
  EXPECT_EQ(words.size(), 2U);
  EXPECT_EQ(words[1].substr(0, 3), "+ y");
  EXPECT_EQ(spans(std::string(2 * kLongestSpan, 'x')).size(), 2U);
}

/// What must come back from any tokenizer unchanged.
std::vector<std::string> difficult_texts() {
  std::string every_byte;
  for (int byte = 0; byte < 256; ++byte) every_byte += static_cast<char>(byte);
  return {"",
          "plain text",
          "  two  spaces  ",
          "\n\n\tindented\r\n",
          "<s> </s> <unk> <0x41> \u2047",
          "a\u2581b \u2581\u2585",
          "naïve 漢字 😀 e\u0301",
          "\xef\xbf\xbd",
          every_byte,
          "\xff\xfe broken",
          std::string("nul\0byte", 8),
          std::string(9000, 'z'),
          "ﬁ ① Ａ \u00a0 \ufeff \u200b"};
}

TEST(Tokenizer, BytesComeBack) {
  const auto bytes = byte_tokenizer();
  EXPECT_EQ(bytes->vocabulary(), 256);
  EXPECT_EQ(bytes->encode("A\xff"), (std::vector<int32_t>{65, 255}));
  for (const auto& text : difficult_texts()) EXPECT_EQ(bytes->decode(bytes->encode(text)), text);
  EXPECT_THROW(bytes->decode(std::vector<int32_t>{256}), DataError);
}

TEST(Tokenizer, AnyTextComesBack) {
  const auto text = some_text(2000);
  for (const auto kind : {Vocabulary::kBytePair, Vocabulary::kUnigram}) {
    const auto tokenizer = train_tokenizer(340, text, kind);
    EXPECT_EQ(tokenizer->vocabulary(), 340);
    const auto tokens = tokenizer->encode(text);
    EXPECT_LT(tokens.size(), text.size() / 3);
    EXPECT_EQ(tokenizer->decode(tokens), text);
    for (const auto& difficult : difficult_texts()) EXPECT_EQ(tokenizer->decode(tokenizer->encode(difficult)), difficult);
    EXPECT_THROW(tokenizer->decode(std::vector<int32_t>{340}), DataError);
    EXPECT_THROW(tokenizer->decode(std::vector<int32_t>{-1}), DataError);
  }
}

TEST(Tokenizer, IsKeptAndReadAgain) {
  const Folder folder;
  const auto text = some_text(500);
  const auto file = folder / "run/tokenizer.model";
  const auto first = open_tokenizer(330, text, folder / "run");
  const auto model = read_file(file);
  const auto again = open_tokenizer(330, "another text", folder / "run");  // nothing to learn from: it must have been read
  EXPECT_EQ(first->encode(text), again->encode(text));
  const auto other = open_tokenizer(320, text, folder / "run");
  EXPECT_EQ(other->vocabulary(), 320);
  EXPECT_EQ(load_tokenizer(file)->vocabulary(), 320);
  train_tokenizer(330, text, Vocabulary::kBytePair, file);
  EXPECT_EQ(read_file(file), model);  // the same text gives the same bytes
}

TEST(Tokenizer, RefusesADamagedModel) {
  const Folder folder;
  const auto file = folder / "tokenizer.model";
  std::ofstream(file) << "no model";
  EXPECT_TRUE(
      contains(message_of<DataError>([&] { open_tokenizer(330, some_text(500), folder); }), "tokenizer.model\" is damaged"));
  EXPECT_THROW(load_tokenizer(folder / "none"), DataError);
}

TEST(Tokenizer, NamesTheVocabularyThatWorks) {
  const auto text = some_text(300);
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { open_tokenizer(255, text, {}); }), "option vocab must be 256"));
  EXPECT_EQ(open_tokenizer(256, text, {})->vocabulary(), 256);
  for (const auto kind : {Vocabulary::kBytePair, Vocabulary::kUnigram}) {
    const auto limit = [&](int64_t vocabulary, const std::string& mark) {
      const auto message = message_of<ConfigError>([&] { open_tokenizer(vocabulary, text, {}, kind); });
      EXPECT_TRUE(contains(message, tessera::text("option vocab is ", vocabulary))) << message;
      const auto at = message.find(mark);
      EXPECT_NE(at, std::string::npos) << message;
      return at == std::string::npos ? 0 : std::stoll(message.substr(at + mark.size()));
    };
    const auto largest = limit(100'000, "no more than "), smallest = limit(257, "at least ");
    EXPECT_EQ(open_tokenizer(largest, text, {}, kind)->vocabulary(), largest);
    EXPECT_EQ(open_tokenizer(smallest, text, {}, kind)->vocabulary(), smallest);
  }
  EXPECT_THROW(train_tokenizer(300, "\n\n\n", Vocabulary::kBytePair), DataError);
}

TEST(TextData, LoadsWithATokenizer) {
  const Folder folder;
  const auto file = folder / "text.txt";
  std::ofstream(file) << some_text(2000);
  const auto data = TextData::load(file, 340, folder / "run", 16, 0);
  EXPECT_EQ(data->vocabulary(), 340);
  EXPECT_GT(data->bytes_per_token(), 2.0);
  const auto tokens = data->validation_batch(0, 1)[0].to(torch::kInt);
  const auto begin = data->tokenizer().decode({tokens.const_data_ptr<int32_t>(), 17});
  EXPECT_EQ(data->validation_text().substr(0, begin.size()), begin);
  EXPECT_TRUE(fs::exists(folder / "run/tokenizer.model"));
}

TEST(SyntheticData, DependsOnSeedAndIndexAlone) {
  const SyntheticData data(50, 8, 3), same(50, 8, 3), other(50, 8, 4);
  const auto whole = data.batch(5, Rank(0), 1, 4);
  EXPECT_TRUE(at::cat({same.batch(5, Rank(0), 2, 2), same.batch(5, Rank(1), 2, 2)}).equal(whole));
  EXPECT_FALSE(other.batch(5, Rank(0), 1, 4).equal(whole));
  EXPECT_GE(whole.min().item<int64_t>(), 0);
  EXPECT_LT(whole.max().item<int64_t>(), 50);
  EXPECT_FALSE(data.validation_batch(0, 4).equal(data.batch(0, Rank(0), 1, 4)));
  EXPECT_THROW(SyntheticData(1, 8, 0), ConfigError);
}

TEST(SyntheticData, AdvancesByAStrideAndABit) {
  const SyntheticData data(1000, 8, 0);
  const auto steps = (data.batch(0, Rank(0), 1, 50).diff() + 1000).remainder(1000);
  EXPECT_TRUE((steps <= 8).all().item<bool>());
  EXPECT_TRUE((steps.amax(1) - steps.amin(1) <= 2).all().item<bool>());
}

TEST(Bigram, PredictsWhatItCounted) {
  // After 'a' always 'b', after 'b' always 'a': certain, but for the smallest smoothing of the grid.
  const auto sure = bigram_baseline("abababababab", "babab");
  EXPECT_DOUBLE_EQ(sure.alpha, 1e-4);
  EXPECT_NEAR(sure.nats_per_byte, 255 * 1e-4 / 5.5, 1e-4);
  // Never seen: the most smoothing, and at worst every byte alike.
  const auto lost = bigram_baseline("aaaa", "zyx");
  EXPECT_NEAR(lost.nats_per_byte, std::log(256.0), 1e-12);
  const auto mixed = bigram_baseline("aaabaaab", "aab");
  EXPECT_NEAR(
      mixed.nats_per_byte,
      -(std::log((4 + mixed.alpha) / (6 + 256 * mixed.alpha)) + std::log((2 + mixed.alpha) / (6 + 256 * mixed.alpha))) / 2,
      1e-12);
  EXPECT_THROW(bigram_baseline("abc", "a"), DataError);
}

}  // namespace
