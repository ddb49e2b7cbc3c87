#include "cli/readable.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

size_t characters(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xC0) != 0x80; }));
}

std::string padding(const std::string& text, size_t width) {
  const size_t have = characters(text);
  return std::string(width > have ? width - have : 0, ' ');
}

}  // namespace

std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  const int64_t first = number < 0 ? 1 : 0;
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > first; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

std::string fixed(double value, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return out.str();
}

std::string binary_size(double bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1000 && unit + 1 < std::size(kUnits)) bytes /= 1024, ++unit;
  return text(fixed(bytes, bytes < 10 && unit > 0 ? 1 : 0), ' ', kUnits[unit]);
}

std::string clock_time(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "?";
  const int64_t all = std::llround(seconds), hours = all / 3600, minutes = all / 60 % 60;
  std::ostringstream out;
  out << std::setfill('0');
  if (hours > 0) out << hours << ':' << std::setw(2);
  out << minutes << ':' << std::setw(2) << all % 60;
  return out.str();
}

std::string table(const std::vector<std::vector<std::string>>& rows, const std::string& indent, Align others) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t column = 0; column < row.size(); ++column)
      widths[column] = std::max(widths[column], characters(row[column]));
  }
  std::string lines;
  for (const auto& row : rows) {
    std::string line = indent;
    for (size_t column = 0; column < row.size(); ++column) {
      const std::string& cell = row[column];
      const std::string space = padding(cell, widths[column]);
      line += column == 0 ? "" : "  ";
      line += column == 0 || others == Align::left ? cell + space : space + cell;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    lines += line + '\n';
  }
  return lines;
}

}  // namespace tessera::cli
