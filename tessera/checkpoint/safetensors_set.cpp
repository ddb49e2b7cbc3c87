#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/checkpoint/safetensors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kIndexEnd = ".safetensors.index.json", kFileEnd = ".safetensors";

std::vector<fs::path> files_in(const fs::path& folder, std::string_view end) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), last; !error && it != last; it.increment(error))
    if (it->path().filename().string().ends_with(end)) files.push_back(it->path());
  if (error) throw DataError(text("folder ", folder, " can't be read: ", error.message()));
  std::sort(files.begin(), files.end());
  return files;
}

// The file of each tensor, by its name.
std::map<std::string, std::string> weight_map_of(const fs::path& index) {
  const auto refuse = [&](const std::string& why) {
    throw DataError(text("index ", index, " is ", why, "; write or download it again"));
  };
  std::error_code error;
  const auto size = fs::file_size(index, error);
  if (error) throw DataError(text("index ", index, " can't be read: ", error.message()));
  if (size > static_cast<uintmax_t>(SafetensorsFile::kLongestHeader)) refuse(text("too long: ", size, " bytes"));
  std::ifstream stream(index, std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(stream), {});
  if (!stream || bytes.size() != size) throw DataError(text("index ", index, " can't be read whole"));
  nlohmann::json all;
  try {
    all = parse_json(bytes);
  } catch (const DataError& fault) {
    refuse(fault.what());
  }
  if (!all.contains("weight_map") || !all["weight_map"].is_object()) refuse("without a \"weight_map\"");
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : all["weight_map"].items()) {
    if (!file.is_string()) refuse(text("of another form: the file of tensor '", name, "' is no string"));
    const fs::path path = file.get<std::string>();
    if (path.empty() || path.is_absolute() || std::find(path.begin(), path.end(), "..") != path.end())
      refuse(text("not to be trusted: the file of tensor '", name, "' would be ", path, ", outside of the index's folder"));
    files[name] = path.string();
  }
  return files;
}

}  // namespace

SafetensorsSet::SafetensorsSet(const fs::path& path) : path_(path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    if (path.extension() == ".json")
      add_indexed(path);
    else
      add_all({path});
  } else if (const auto indices = files_in(path, kIndexEnd); !indices.empty()) {
    if (indices.size() > 1)
      throw DataError(text("folder ", path, " has several indices, ", indices[0].filename(), " and ", indices[1].filename(),
                           "; name the one to load"));
    add_indexed(indices[0]);
  } else {
    const auto files = files_in(path, kFileEnd);
    if (files.empty()) throw DataError(text("folder ", path, " has no file *", kFileEnd, " and no *", kIndexEnd));
    add_all(files);
  }
  sort();
}

void SafetensorsSet::add_indexed(const fs::path& index) {
  const auto map = weight_map_of(index);
  std::map<std::string, std::map<std::string, const FileTensor*>> tensors;  // by file and name
  std::vector<std::string> names;
  for (const auto& [name, file] : map)
    if (tensors.try_emplace(file).second) names.push_back(file);
  for (const auto& name : names) files_.emplace_back(index.parent_path() / name);
  for (size_t f = 0; f < files_.size(); ++f)
    for (const auto& tensor : files_[f].tensors()) tensors[names[f]].emplace(tensor.name, &tensor);
  for (const auto& [name, file] : map) {
    const auto found = tensors[file].find(name);
    if (found == tensors[file].end())
      throw DataError(text("index ", index, " has tensor '", name, "' in file '", file,
                           "', which lacks it; write or download both again"));
    const auto f = static_cast<size_t>(std::find(names.begin(), names.end(), file) - names.begin());
    tensors_.push_back({f, found->second});
  }
}

void SafetensorsSet::add_all(const std::vector<fs::path>& files) {
  for (const auto& file : files) files_.emplace_back(file);
  for (size_t f = 0; f < files_.size(); ++f)
    for (const auto& tensor : files_[f].tensors()) tensors_.push_back({f, &tensor});
}

void SafetensorsSet::sort() {
  std::sort(tensors_.begin(), tensors_.end(),
            [](const Entry& a, const Entry& b) { return a.tensor->name < b.tensor->name; });
  for (size_t i = 1; i < tensors_.size(); ++i)
    if (tensors_[i - 1].tensor->name == tensors_[i].tensor->name)
      throw DataError(text("tensor '", tensors_[i].tensor->name, "' is in both ", files_[tensors_[i - 1].file].path(),
                           " and ", files_[tensors_[i].file].path(), "; name the file or the index to load"));
}

const SafetensorsSet::Entry* SafetensorsSet::find(std::string_view name) const {
  const auto found = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                      [](const Entry& entry, std::string_view n) { return entry.tensor->name < n; });
  return found != tensors_.end() && found->tensor->name == name ? &*found : nullptr;
}

}  // namespace tessera
