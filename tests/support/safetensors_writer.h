#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <string>

namespace tessera::test {

/// Writes whole tensors to a safetensors file, in the order of their names. Returns the bytes of the data.
int64_t write_safetensors(const std::filesystem::path& file, const std::map<std::string, torch::Tensor>& tensors);

/// Writes them to `files` files in `folder`, and an index of them. Returns the index's path.
std::filesystem::path write_indexed(const std::filesystem::path& folder, const std::map<std::string, torch::Tensor>& tensors,
                                    size_t files);

}  // namespace tessera::test
