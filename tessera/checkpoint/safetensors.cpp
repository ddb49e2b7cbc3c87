#include "tessera/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/json_file.h"

namespace tessera {
namespace {

struct TypeInfo {
  std::string_view name;
  int64_t bytes;
};

// In the order of FileType.
constexpr TypeInfo kTypes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
                               {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
                               {"F32", 4},  {"C64", 8}, {"F64", 8}, {"I64", 8},     {"U64", 8}};

constexpr int64_t kLengthBytes = 8;

// Bytes of a tensor; −1 if they are too many to count.
int64_t size_of(const FileTensor& tensor) {
  int64_t size = bytes_of(tensor.type);
  for (const int64_t each : tensor.shape)
    if (__builtin_mul_overflow(size, each, &size)) return -1;
  return size;
}

}  // namespace

std::string_view name_of(FileType type) { return kTypes[static_cast<size_t>(type)].name; }
int64_t bytes_of(FileType type) { return kTypes[static_cast<size_t>(type)].bytes; }

void SafetensorsFile::refuse(const std::string& why) const {
  throw DataError(text("file ", path_, " is no intact safetensors file: ", why, "; write or download it again"));
}

SafetensorsFile::SafetensorsFile(std::filesystem::path path) : path_(std::move(path)) {
  // Opening a pipe would wait for a writer.
  descriptor_ = Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!descriptor_.open() || fstat(descriptor_.get(), &status) != 0)
    throw DataError(text("file ", path_, " can't be opened: ", std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) throw DataError(text("file ", path_, " is not a regular file"));
  bytes_ = status.st_size;
  identity_ = text(status.st_dev, ":", status.st_ino);
  if (bytes_ < kLengthBytes) refuse(text("it has ", bytes_, " bytes, fewer than the 8 of the header's length"));
  unsigned char digits[kLengthBytes];
  read(0, std::as_writable_bytes(std::span(digits)));
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) length = length << 8 | digits[i];
  if (length > static_cast<uint64_t>(kLongestHeader))
    refuse(text("its header would have ", length, " bytes, and ", kLongestHeader, " is the most"));
  if (static_cast<int64_t>(length) > bytes_ - kLengthBytes)
    refuse(text("its header would have ", length, " bytes, but only ", bytes_ - kLengthBytes, " follow"));
  std::string header(length, '\0');
  read(kLengthBytes, std::as_writable_bytes(std::span(header)));
  data_begin_ = kLengthBytes + static_cast<int64_t>(length);
  header_hash_ = XXH3_64bits(header.data(), header.size());
  parse(header);
  check_places();
}

void SafetensorsFile::parse(std::string_view header) {
  if (header.empty() || header.front() != '{') refuse("its header does not begin with {");
  nlohmann::json all;
  try {
    all = parse_json(header);
  } catch (const DataError& error) {
    refuse(text("its header is ", error.what()));
  }
  for (const auto& [name, info] : all.items()) {
    if (name == "__metadata__") {
      const auto is_text = [](const nlohmann::json& value) { return value.is_string(); };
      if (!info.is_object() || !std::all_of(info.begin(), info.end(), is_text))
        refuse("its __metadata__ is no object of strings");
      continue;
    }
    const auto counts = [](const nlohmann::json& values) {
      return values.is_array() && std::all_of(values.begin(), values.end(), [](const nlohmann::json& value) {
               return value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
             });
    };
    if (!info.is_object() || !info.contains("dtype") || !info["dtype"].is_string() || !info.contains("shape") ||
        !counts(info["shape"]) || !info.contains("data_offsets") || !counts(info["data_offsets"]) ||
        info["data_offsets"].size() != 2)
      refuse(text("tensor '", name, "' lacks a dtype, a shape or two data_offsets, or they are no counts"));
    const auto type = info["dtype"].get<std::string>();
    const auto* known =
        std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeInfo& t) { return t.name == type; });
    if (known == std::end(kTypes))
      throw DataError(text("file ", path_, ": tensor '", name, "' has the dtype '", type, "', which can't be read here"));
    const auto begin = info["data_offsets"][0].get<int64_t>(), end = info["data_offsets"][1].get<int64_t>();
    const int64_t there = bytes_ - data_begin_;
    if (end > there || begin > end)
      refuse(text("tensor '", name, "' would be bytes ", begin, " to ", end, " of ", there, " that follow the header"));
    tensors_.push_back({name, static_cast<FileType>(known - std::begin(kTypes)), info["shape"].get<std::vector<int64_t>>(),
                        data_begin_ + begin, data_begin_ + end});
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const FileTensor& a, const FileTensor& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
}

void SafetensorsFile::check_places() const {
  int64_t at = data_begin_;
  for (const auto& tensor : tensors_) {
    if (const int64_t size = size_of(tensor); size != tensor.end - tensor.begin)
      refuse(text("tensor '", tensor.name, "' has ", tensor.end - tensor.begin, " bytes, but ", name_of(tensor.type), " ",
                  words_of_shape(tensor.shape), " has ", size < 0 ? "more than can be counted" : std::to_string(size)));
    if (tensor.begin != at)
      refuse(text("tensor '", tensor.name, "' begins at byte ", tensor.begin - data_begin_,
                  " behind the header, but the one before it ends at ", at - data_begin_));
    at = tensor.end;
  }
  if (at != bytes_) refuse(text("its tensors end at byte ", at, ", but it has ", bytes_));
}

void SafetensorsFile::read(int64_t begin, std::span<std::byte> to) const {
  size_t done = 0;
  while (done < to.size()) {
    const ssize_t got = ::pread(descriptor_.get(), to.data() + done, to.size() - done, begin + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    const int64_t at = begin + static_cast<int64_t>(done);
    if (got < 0) throw DataError(text("file ", path_, " can't be read at byte ", at, ": ", std::strerror(errno)));
    if (got == 0)
      throw DataError(text("file ", path_, " ends at byte ", at, ", but had ", bytes_,
                           " bytes when it was opened: it was changed meanwhile"));
    done += static_cast<size_t>(got);
  }
}

}  // namespace tessera
