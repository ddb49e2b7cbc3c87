#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace tessera::test {

inline void write_bytes(const std::filesystem::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
}

/// The bytes of a safetensors file of this header, whatever it says, and this data.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  std::string bytes;
  for (uint64_t rest = header.size(), i = 0; i < 8; ++i, rest >>= 8) bytes += static_cast<char>(rest & 0xff);
  return bytes + header + data;
}

}  // namespace tessera::test
