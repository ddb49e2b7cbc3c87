#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera::models {

/// The bytes of a file. Throws DataError, with name and reason, if it is missing, a directory or another thing that is no
/// regular file, unreadable, or empty.
std::string read_file(const std::filesystem::path& file);

/// Writes a file that is afterwards whole or, on failure, as it was before: the bytes go to a neighbour that is then
/// renamed. Makes the folders above it. Throws SystemError with name and reason.
void write_file(const std::filesystem::path& file, std::string_view bytes);

}  // namespace tessera::models
