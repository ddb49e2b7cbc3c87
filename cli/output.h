#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tessera::cli {

/// Writes to standard output at once. Throws SystemError if that can't be (a full disk).
void print(std::string_view bytes);

/// Throws ConfigError, naming the option json, if `destination` can't be written by `write_json`: a directory or a device,
/// or in a folder that is not there and can't be made, or is not ours to write.
void check_json_destination(const std::string& destination);

/// Throws ConfigError, naming `option`, unless a file or folder can be made at `path`: the nearest folder above that exists
/// is ours to write.
void check_can_be_made(const char* option, const std::string& path);

/// Writes `value` as one line: to standard output for "-", else to a file that is whole or absent whatever happens. Bytes
/// that are not UTF-8 become U+FFFD, numbers that are not finite become null. Throws SystemError with name and reason.
void write_json(const std::string& destination, const nlohmann::json& value);

}  // namespace tessera::cli
