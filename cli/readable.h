#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

/// "1,234,567".
std::string grouped(int64_t number);

/// `value` with that many digits after the point.
std::string fixed(double value, int digits);

/// "210 MiB", "1.4 GiB", "12 bytes": three digits at most before the unit changes.
std::string binary_size(double bytes);

/// "0:07", "12:34", "1:02:03"; "?" for what is no time. `seconds` is rounded.
std::string clock_time(double seconds);

enum class Align { left, right };

/// One line a row, each beginning with `indent`; the first column is aligned left, the others as `others` says, two spaces
/// between them. Width counts characters (UTF-8), not bytes.
std::string table(const std::vector<std::vector<std::string>>& rows, const std::string& indent = "",
                  Align others = Align::right);

}  // namespace tessera::cli
