#include "tests/support/safetensors_writer.h"

#include <vector>

#include "tessera/base/text.h"
#include "tests/support/safetensors_bytes.h"

namespace tessera::test {
namespace {

std::string type_of(const torch::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case torch::kFloat:
      return "F32";
    case torch::kDouble:
      return "F64";
    case torch::kHalf:
      return "F16";
    case torch::kBFloat16:
      return "BF16";
    case torch::kFloat8_e4m3fn:
      return "F8_E4M3";
    case torch::kFloat8_e5m2:
      return "F8_E5M2";
    case torch::kFloat8_e8m0fnu:
      return "F8_E8M0";
    case torch::kUInt32:
      return "U32";
    case torch::kUInt64:
      return "U64";
    case torch::kComplexFloat:
      return "C64";
    case torch::kLong:
      return "I64";
    case torch::kInt:
      return "I32";
    case torch::kShort:
      return "I16";
    case torch::kChar:
      return "I8";
    case torch::kByte:
      return "U8";
    case torch::kUInt16:
      return "U16";
    case torch::kBool:
      return "BOOL";
    default:
      throw std::runtime_error(text("no file has the type ", tensor.scalar_type()));
  }
}

}  // namespace

int64_t write_safetensors(const std::filesystem::path& file, const std::map<std::string, torch::Tensor>& tensors) {
  std::string header = R"({"__metadata__":{"format":"pt"})", data;
  for (const auto& [name, tensor] : tensors) {
    const auto values = tensor.detach().contiguous();
    std::string shape;
    for (const int64_t size : values.sizes()) shape += text(shape.empty() ? "" : ",", size);
    header += text(",\"", name, R"(":{"dtype":")", type_of(values), R"(","shape":[)", shape, R"(],"data_offsets":[)",
                   data.size(), ",", data.size() + values.nbytes(), "]}");
    data.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  write_bytes(file, safetensors_bytes(header, data));
  return static_cast<int64_t>(data.size());
}

std::filesystem::path write_indexed(const std::filesystem::path& folder, const std::map<std::string, torch::Tensor>& tensors,
                                    size_t files) {
  std::vector<std::map<std::string, torch::Tensor>> parts(files);
  std::string map;
  size_t i = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t part = i++ % files;
    parts[part][name] = tensor;
    map += text(map.empty() ? "" : ",", '"', name, "\":\"part-", part, ".safetensors\"");
  }
  for (size_t part = 0; part < files; ++part) write_safetensors(folder / text("part-", part, ".safetensors"), parts[part]);
  auto index = folder / "model.safetensors.index.json";
  write_bytes(index, text(R"({"metadata":{"total_size":1},"weight_map":{)", map, "}}"));
  return index;
}

}  // namespace tessera::test
