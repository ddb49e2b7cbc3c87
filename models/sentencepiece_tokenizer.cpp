#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <array>
#include <charconv>
#include <cstdio>
#include <optional>
#include <unordered_map>

#include "models/text_file.h"
#include "models/text_spans.h"
#include "models/tokenizer.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {
namespace {

using tessera::text;

constexpr size_t kTrainingBytes = size_t{16} << 20;
constexpr std::string_view kSpaceMark = "\u2581";

/// What a piece stands for: sentencepiece writes a space as its mark.
std::string surface(std::string_view piece) {
  std::string result;
  while (!piece.empty()) {
    const bool space = piece.starts_with(kSpaceMark);
    result += space ? ' ' : piece.front();
    piece.remove_prefix(space ? kSpaceMark.size() : 1);
  }
  return result;
}

class SentencepieceTokenizer final : public Tokenizer {
 public:
  /// `source` says where `model` came from, for messages.
  SentencepieceTokenizer(std::string_view model, const std::string& source) {
    const auto status = processor_.LoadFromSerializedProto({model.data(), model.size()});
    if (!status.ok())
      throw DataError(
          text(source, " is damaged or no sentencepiece model (", status.ToString(), "): delete it, and it is made again"));
    for (int token = 0; token < processor_.GetPieceSize(); ++token)
      surfaces_.push_back(surface(processor_.IdToPiece(token)));
    for (size_t byte = 0; byte < byte_tokens_.size(); ++byte) {
      char name[8];
      std::snprintf(name, sizeof(name), "<0x%02zX>", byte & 0xff);
      const int token = processor_.PieceToId(name);
      if (!processor_.IsByte(token))
        throw DataError(text(source, " has no token for byte ", byte,
                             ": it was trained without byte_fallback and can't represent every text"));
      byte_tokens_[byte] = token;
      surfaces_[static_cast<size_t>(token)].assign(1, static_cast<char>(byte));
    }
  }

  std::vector<int32_t> encode(std::string_view rest) const override {
    std::vector<int32_t> tokens;
    KnownWords known;
    while (!rest.empty()) {
      const auto span = first_span(rest);
      rest.remove_prefix(span.bytes.size());
      span.plain ? append_words(span.bytes, known, tokens) : append_bytes(span.bytes, tokens);
    }
    return tokens;
  }

  std::string decode(std::span<const int32_t> tokens) const override {
    std::string result;
    for (const int32_t token : tokens) {
      if (token < 0 || token >= vocabulary())
        throw DataError(text("token ", token, " is not in the vocabulary of ", vocabulary()));
      result += surfaces_[static_cast<size_t>(token)];
    }
    return result;
  }

  int64_t vocabulary() const override { return processor_.GetPieceSize(); }

 private:
  struct Run {
    size_t begin, end;
  };
  using KnownWords = std::unordered_map<std::string_view, Run>;  // where in the tokens so far a word's are

  void append_bytes(std::string_view bytes, std::vector<int32_t>& tokens) const {
    for (const unsigned char byte : bytes) tokens.push_back(byte_tokens_[byte]);
  }

  /// Word by word: no piece goes past the space before a word, and a word met before has its tokens already. On 5 MB of
  /// Shakespeare that is several times as fast as whole lines.
  void append_words(std::string_view rest, KnownWords& known, std::vector<int32_t>& tokens) const {
    while (!rest.empty()) {
      const auto word = rest.substr(0, rest.find(' ', 1));
      rest.remove_prefix(word.size());
      const auto [found, is_new] = known.try_emplace(word, Run{tokens.size(), 0});
      if (is_new) {
        append_pieces(word, tokens);
        found->second.end = tokens.size();
      } else {
        for (size_t i = found->second.begin; i < found->second.end; ++i) tokens.push_back(tokens[i]);
      }
    }
  }

  void append_pieces(std::string_view word, std::vector<int32_t>& tokens) const {
    std::vector<int> pieces;
    const auto status = processor_.Encode({word.data(), word.size()}, &pieces);
    if (!status.ok()) throw DataError(text("sentencepiece can't encode '", word, "': ", status.ToString()));
    tokens.insert(tokens.end(), pieces.begin(), pieces.end());
  }

  sentencepiece::SentencePieceProcessor processor_;
  std::array<int32_t, 256> byte_tokens_{};
  std::vector<std::string> surfaces_;  // what each token stands for
};

class Sentences final : public sentencepiece::SentenceIterator {
 public:
  explicit Sentences(std::string_view rest) {
    const size_t stride = (rest.size() + kTrainingBytes - 1) / kTrainingBytes;
    for (size_t count = 0; !rest.empty();) {
      const auto span = first_span(rest);
      rest.remove_prefix(span.bytes.size());
      if (span.plain && count++ % stride == 0) sentences_.emplace_back(span.bytes);
    }
  }
  bool done() const override { return next_ >= sentences_.size(); }
  void Next() override { ++next_; }
  const std::string& value() const override { return sentences_[next_]; }
  sentencepiece::util::Status status() const override { return {}; }
  bool empty() const { return sentences_.empty(); }

 private:
  std::vector<std::string> sentences_;
  size_t next_ = 0;
};

/// The number after `mark` in `message`.
std::optional<int64_t> number_after(const std::string& message, std::string_view mark) {
  const size_t at = message.find(mark);
  int64_t number = 0;
  if (at == std::string::npos) return std::nullopt;
  const char* begin = message.data() + at + mark.size();
  const auto [end, error] = std::from_chars(begin, message.data() + message.size(), number);
  return error == std::errc() ? std::optional(number) : std::nullopt;
}

[[noreturn]] void explain_failure(int64_t vocabulary, const std::string& message) {
  if (const auto largest = number_after(message, "to a value <= "))
    throw ConfigError(text("option vocab is ", vocabulary, ", but the text supports no more than ", *largest,
                           " tokens: use that or less, or a longer text"));
  if (const auto smallest = number_after(message.substr(std::min(message.find("required_chars. "), message.size())), " vs "))
    throw ConfigError(text("option vocab is ", vocabulary, ", but a tokenizer for this text needs at least ", *smallest,
                           " (each byte, and each of its common characters): use that or more, or 256 for bytes alone"));
  throw ConfigError(text("sentencepiece can't learn a vocabulary of ", vocabulary, " from the text: ", message));
}

}  // namespace

std::shared_ptr<const Tokenizer> train_tokenizer(int64_t vocabulary, std::string_view text, Vocabulary kind,
                                                 const std::filesystem::path& model_file) {
  Sentences sentences(text);
  if (sentences.empty()) throw DataError("the text has nothing but control characters: a tokenizer can't learn from it");
  const std::unordered_map<std::string, std::string> options{
      {"model_type", kind == Vocabulary::kBytePair ? "bpe" : "unigram"},
      {"vocab_size", std::to_string(vocabulary)},
      {"byte_fallback", "true"},
      {"character_coverage", "0.9995"},
      {"normalization_rule_name", "identity"},  // with the next two: what goes in comes out
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"bos_id", "-1"},
      {"eos_id", "-1"},
      {"pad_id", "-1"},
      {"num_threads", "1"},  // sums in one order: the same text gives the same model
      {"minloglevel", "3"}};
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &sentences, &model);
  if (!status.ok()) explain_failure(vocabulary, status.ToString());
  if (!model_file.empty()) write_file(model_file, model);
  return std::make_shared<SentencepieceTokenizer>(model, "the tokenizer just trained");
}

std::shared_ptr<const Tokenizer> load_tokenizer(const std::filesystem::path& model_file) {
  return std::make_shared<SentencepieceTokenizer>(read_file(model_file), tessera::text("tokenizer ", model_file));
}

}  // namespace tessera::models
