#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/descriptor.h"
#include "tessera/base/types.h"

namespace tessera {

/// The element types of safetensors files, little-endian. Those of less than a byte (F4, F6) are not read.
enum class FileType : uint8_t {
  boolean,  ///< a byte; not 0 is true
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,  ///< two f32
  f64,
  i64,
  u64,
};

std::string_view name_of(FileType type);  ///< as files have it: "F32", "BOOL"
int64_t bytes_of(FileType type);          ///< of an element

/// A tensor in a file. Its elements lie row-major, without padding.
struct FileTensor {
  std::string name;
  FileType type;
  std::vector<int64_t> shape;
  int64_t begin, end;  ///< bytes from the start of the file
};

/// A file in the safetensors format (github.com/huggingface/safetensors, "Format"): 8 bytes with the length N of the header,
/// N bytes of JSON that say each tensor's type, shape and place, then the tensors' bytes without holes. It is opened and its
/// header read at construction; tensors' bytes are read when they are asked for, and only those.
class SafetensorsFile {
 public:
  /// Most bytes of a header, as in the reference implementation.
  static constexpr int64_t kLongestHeader = 100'000'000;

  /// Throws DataError naming the file and what is wrong with it: it is missing, no regular file, shorter or longer than its
  /// header says; the header is too long, no JSON of that form, or has a name twice; a tensor's type is unknown, its size is
  /// not that of its shape, or it overlaps another or leaves a hole. O(header).
  explicit SafetensorsFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<FileTensor>& tensors() const { return tensors_; }  ///< in the order of their bytes
  int64_t data_begin() const { return data_begin_; }                   ///< where the first tensor begins
  int64_t bytes() const { return bytes_; }                             ///< of the whole file
  uint64_t header_hash() const { return header_hash_; }
  const std::string& identity() const { return identity_; }  ///< on one host, of the same file the same

  /// Fills `to` with what lies `begin` bytes from the start of the file. Throws DataError with the system's reason, or if
  /// the file has become shorter since it was opened.
  void read(int64_t begin, std::span<std::byte> to) const;

 private:
  void parse(std::string_view header);
  void check_places() const;
  [[noreturn]] void refuse(const std::string& why) const;

  std::filesystem::path path_;
  Descriptor descriptor_;
  std::vector<FileTensor> tensors_;
  int64_t data_begin_ = 0, bytes_ = 0;
  uint64_t header_hash_ = 0;
  std::string identity_;
};

/// Tensors of one file or of several.
class SafetensorsSet {
 public:
  /// `path`: a file in the safetensors format; an index (*.json, whose "weight_map" names each tensor's file, beside it); or
  /// a folder, which stands for the one index in it (*.safetensors.index.json), or without one for all its *.safetensors
  /// files. Throws DataError as SafetensorsFile does; for a folder with none or with several indices; for a file that the
  /// index names and that is missing, or lacks a tensor; for a tensor in two files. O(headers).
  explicit SafetensorsSet(const std::filesystem::path& path);

  struct Entry {
    size_t file;
    const FileTensor* tensor;
  };
  const std::vector<SafetensorsFile>& files() const { return files_; }
  /// Sorted by name. Tensors that an index does not name are not part of the set.
  const std::vector<Entry>& tensors() const { return tensors_; }
  const Entry* find(std::string_view name) const;  ///< nullptr if there is none. O(log tensors)
  const std::filesystem::path& path() const { return path_; }

 private:
  void add_indexed(const std::filesystem::path& index);
  void add_all(const std::vector<std::filesystem::path>& files);
  void sort();

  std::filesystem::path path_;
  std::vector<SafetensorsFile> files_;
  std::vector<Entry> tensors_;
};

}  // namespace tessera
