#include "tessera/base/suggest.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include "tessera/base/text.h"

namespace tessera {
namespace {

std::string plain(std::string_view word) {
  word.remove_prefix(std::min(word.find_first_not_of('-'), word.size()));
  std::string letters(word);
  for (char& letter : letters)
    letter = letter == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return letters;
}

}  // namespace

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> older(b.size() + 1), old(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    older.swap(old);
    old.swap(row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({old[j] + 1, row[j - 1] + 1, old[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], older[j - 2] + 1);
    }
  }
  return row.back();
}

std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates) {
  const std::string typed = plain(word);
  if (typed.empty()) return std::nullopt;
  const std::string* best = nullptr;
  size_t best_distance = std::max<size_t>(1, typed.size() / 3) + 1;
  for (const auto& candidate : candidates) {
    const size_t distance = edit_distance(typed, plain(candidate));
    if (distance >= best_distance) continue;
    best = &candidate;
    best_distance = distance;
  }
  if (best != nullptr) return *best;
  for (const auto& candidate : candidates)  // an abbreviation is far in letters, near in meaning
    if (typed.size() >= 2 && plain(candidate).starts_with(typed)) return candidate;
  return std::nullopt;
}

std::string did_you_mean(std::string_view word, std::span<const std::string> candidates) {
  const auto guess = nearest(word, candidates);
  return guess ? text("; did you mean '", *guess, "'?") : std::string();
}

}  // namespace tessera
