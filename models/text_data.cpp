#include "models/text_data.h"

#include <algorithm>

#include "models/counter_random.h"
#include "models/text_file.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::models {
namespace {

/// Nine tenths of the text, up to the end of that line, or that character where no line ends soon.
size_t validation_begin(std::string_view text) {
  const size_t nine_tenths = text.size() / 10 * 9 + text.size() % 10 * 9 / 10;
  const size_t line_end = text.substr(nine_tenths, std::max<size_t>(text.size() / 100, 1)).find('\n');
  if (line_end != std::string_view::npos) return nine_tenths + line_end + 1;
  size_t begin = nine_tenths;
  while (begin < text.size() && begin - nine_tenths < 4 && (static_cast<unsigned char>(text[begin]) & 0xc0) == 0x80) ++begin;
  return begin;
}

}  // namespace

TextData::TextData(const std::string& name, std::string text, std::shared_ptr<const Tokenizer> tokenizer, int64_t context,
                   uint64_t seed)
    : TokenSource(context),
      text_(std::move(text)),
      split_(validation_begin(text_)),
      tokenizer_(std::move(tokenizer)),
      seed_(seed) {
  training_ = tokenizer_->encode(training_text());
  validation_ = tokenizer_->encode(validation_text());
  if (std::min(training_.size(), validation_.size()) < static_cast<size_t>(context) + 1)
    throw DataError(tessera::text("data file ", name, " (", text_.size(), " bytes) gives ", training_.size(),
                                  " tokens for training and ", validation_.size(),
                                  " for validation, but a sample of context ", context, " needs ", context + 1,
                                  " of each: use a longer text or a smaller context"));
}

std::unique_ptr<TextData> TextData::load(const std::filesystem::path& file, int64_t vocabulary,
                                         const std::filesystem::path& directory, int64_t context, uint64_t seed,
                                         Vocabulary kind) {
  auto text = read_file(file);
  auto tokenizer = open_tokenizer(vocabulary, std::string_view(text).substr(0, validation_begin(text)), directory, kind);
  return std::make_unique<TextData>(file.string(), std::move(text), std::move(tokenizer), context, seed);
}

int64_t TextData::validation_samples() const { return (static_cast<int64_t>(validation_.size()) - 1) / context(); }

double TextData::bytes_per_token() const {
  return static_cast<double>(validation_text().size()) / static_cast<double>(validation_.size());
}

void TextData::write_training_sample(uint64_t index, int64_t* tokens) const {
  const int64_t starts = static_cast<int64_t>(training_.size()) - context();
  const int64_t start = scale_to(counter_random(seed_, /*stream=*/0, index), starts);
  std::copy_n(training_.begin() + start, context() + 1, tokens);
}

void TextData::write_validation_sample(int64_t index, int64_t* tokens) const {
  std::copy_n(validation_.begin() + index * context(), context() + 1, tokens);
}

}  // namespace tessera::models
