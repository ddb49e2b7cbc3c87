#include "tessera/checkpoint/load.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ne.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/agreed.h"
#include "tessera/checkpoint/load_plan.h"
#include "tessera/checkpoint/safetensors_reader.h"
#include "tessera/engine/deferred.h"
#include "tessera/engine/hash.h"
#include "tessera/engine/real_pairs.h"

namespace tessera {
namespace {

constexpr char kRecord = '\x1e';
// What a rank reads before it waits for the others, so that it hears of their errors, and a slow disk is not taken for a
// rank that hangs.
constexpr Bytes kRound{int64_t{1} << 30};
constexpr const char* kPartly =
    "; some parameters and buffers have the files' values now and others not: load again, or discard the model";

// ---- what ranks compare ------------------------------------------------------------------------------------------------

// What all ranks must have alike, a line each; before it the path, and what tells whether it is the same file.
std::vector<std::string> description_of(const SafetensorsSet& files, const LoadPlan& plan) {
  std::vector<std::string> lines{text(files.path()), ""};
  for (size_t f = 0; f < files.files().size(); ++f) {
    const auto& file = files.files()[f];
    lines[1] += file.identity() + " ";
    lines.push_back(
        text("file number ", f, " has ", file.bytes(), " bytes and a header with the hash ", file.header_hash()));
  }
  for (const auto& item : plan.items)
    for (const auto& entry : item.entries)
      lines.push_back(text("'", item.target.names[0], "' is tensor '", entry.tensor->name, "' of file number ", entry.file));
  return lines;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string all;
  for (const auto& line : lines) all += text(all.empty() ? "" : std::string(1, kRecord), line);
  return all;
}

void check_alike(const std::vector<std::vector<std::string>>& everyones) {
  const auto& first = everyones[0];
  for (size_t r = 1; r < everyones.size(); ++r) {
    const auto& theirs = everyones[r];
    for (size_t i = 2; i < std::max(first.size(), theirs.size()); ++i) {
      const auto line = [&](const std::vector<std::string>& of) {
        return i < of.size() ? of[i] : std::string("nothing more");
      };
      if (line(first) != line(theirs))
        throw AgreementError(text("ranks would load different tensors: on rank 0, from ", first[0], ", ", line(first),
                                  "; on rank ", r, ", from ", theirs[0], ", ", line(theirs),
                                  "; give all ranks the same files and LoadOptions"));
    }
  }
}

// A hash of blocks all over a file.
uint64_t hash_of_samples(const SafetensorsFile& file, LoadReport& report) {
  constexpr int64_t kBlocks = 64, kSize = 4096;
  const int64_t step = std::max(kSize, (file.bytes() - file.data_begin()) / kBlocks);
  std::vector<std::byte> bytes;
  for (int64_t at = file.data_begin(); at < file.bytes(); at += step) {
    const size_t had = bytes.size();
    bytes.resize(had + static_cast<size_t>(std::min(kSize, file.bytes() - at)));
    file.read(at, std::span(bytes).subspan(had));
    report.read += Bytes(static_cast<int64_t>(bytes.size() - had));
    ++report.reads;
  }
  return hash_of_bytes(bytes.data(), static_cast<int64_t>(bytes.size()));
}

// Files of the same header may be of different steps of a training.
void check_samples(Communicator& communicator, const SafetensorsSet& files,
                   const std::vector<std::vector<std::string>>& everyones, LoadReport& report) {
  const auto samples = agreed(communicator, "samples of files to load", [&] {
    std::vector<std::string> lines;
    for (const auto& file : files.files()) lines.push_back(std::to_string(hash_of_samples(file, report)));
    return joined(lines);
  });
  for (size_t r = 1; r < samples.size(); ++r)
    if (samples[r] != samples[0])
      throw AgreementError(text("ranks would load different values: ", everyones[0][0], " of rank 0 and ", everyones[r][0],
                                " of rank ", r,
                                " have the same tensors, but not the same bytes; give all ranks the same files"));
}

// Where the files have several tensors for one parameter, each rank compares its part of their bytes.
void check_tied(const Communicator& communicator, const SafetensorsSet& files, const LoadItem& item, LoadReport& report) {
  constexpr int64_t kPart = 1 << 20;
  const auto& one = item.entries[0];
  const int64_t size = one.tensor->end - one.tensor->begin;
  const int64_t each = (size + communicator.size() - 1) / communicator.size();
  const int64_t begin = std::min(size, each * communicator.rank().value), end = std::min(size, begin + each);
  std::vector<std::byte> mine(static_cast<size_t>(std::min(kPart, end - begin))), theirs(mine.size());
  for (size_t e = 1; e < item.entries.size(); ++e) {
    const auto& other = item.entries[e];
    for (int64_t at = begin; at < end; at += kPart) {
      const auto count = static_cast<size_t>(std::min(kPart, end - at));
      files.files()[one.file].read(one.tensor->begin + at, std::span(mine).first(count));
      files.files()[other.file].read(other.tensor->begin + at, std::span(theirs).first(count));
      report.read += Bytes(2 * static_cast<int64_t>(count));
      report.reads += 2;
      if (std::memcmp(mine.data(), theirs.data(), count) != 0)
        throw ConfigError(text("the tensors '", one.tensor->name, "' and '", other.tensor->name, "' of ", files.path(),
                               " have different values, but are one parameter in the model ('", item.target.names[0],
                               "'); untie it, or let LoadOptions::rename give both names the tensor to take"));
    }
  }
}

// ---- what is read ------------------------------------------------------------------------------------------------------

// Writes what is read to where it belongs.
class Writer {
 public:
  Writer(Engine& engine, const LoadPlan& plan) : engine_(engine), plan_(plan), flat_(plan.items.size()) {}

  void take(size_t index, int64_t first, int64_t count, std::byte* data) {
    const LoadItem& item = plan_.items[index];
    const at::Tensor values = values_at(data, count, item.entries[0].tensor->type);
    if (const auto& place = item.target.place)
      engine_.units()[place->unit]->write_part(place->parameter, values, first);
    else
      write_whole(item.target, flat_[index], values, first);
  }

 private:
  static at::Tensor values_at(std::byte* data, int64_t count, FileType type) {
    const bool truth = type == FileType::boolean;  // libtorch's must be 0 or 1
    const at::Tensor values =
        at::from_blob(data, {count}, at::TensorOptions().dtype(truth ? at::kByte : scalar_type_of(type)));
    return truth ? values.ne(0) : values;
  }

  static void write_whole(const LoadTarget& target, at::Tensor& flat, const at::Tensor& values, int64_t first) {
    at::Tensor pairs = real_pairs(target.whole);
    const bool direct = pairs.is_contiguous();
    if (!flat.defined()) flat = direct ? pairs.view(-1) : at::empty({pairs.numel()}, pairs.options());
    flat.narrow(0, first, values.numel()).copy_(values);
    if (direct || first + values.numel() < flat.numel()) return;
    pairs.copy_(flat.view(pairs.sizes()));
    flat.reset();
  }

  Engine& engine_;
  const LoadPlan& plan_;
  std::vector<at::Tensor> flat_;  // of targets that are whole here
};

int64_t rounds_of(Communicator& communicator, const SafetensorsReader& reader) {
  int64_t most = 0;
  for (const auto& bytes : communicator.all_gather("bytes to load", std::to_string(reader.wanted().value)))
    most = std::max<int64_t>(most, std::stoll(bytes));
  return (most + kRound.value - 1) / kRound.value;
}

void read_all(Engine& engine, const SafetensorsSet& files, LoadPlan& plan, LoadReport& report) {
  std::vector<SafetensorsReader::Source> sources;
  for (auto& item : plan.items) sources.push_back({item.entries[0], std::move(item.target.runs)});
  SafetensorsReader reader(files, std::move(sources));
  Writer writer(engine, plan);
  Communicator& communicator = engine.communicator();
  const int64_t rounds = rounds_of(communicator, reader);
  engine.write_in_pieces(plan.places(), [&] {
    for (int64_t round = 0; round < rounds; ++round)
      agreed(
          communicator, "tensors' bytes to load",
          [&] {
            reader.read(kRound, [&](size_t source, int64_t first, int64_t count, std::byte* data) {
              writer.take(source, first, count, data);
            });
            return "";
          },
          kPartly);
  });
  for (const auto& item : plan.items)
    for (const size_t buffer : item.target.buffers) engine.buffers()->note_equal(buffer);
  report.read += reader.read_bytes();
  report.reads += reader.reads();
}

}  // namespace

LoadReport load_at_once(Sharded& sharded, const std::filesystem::path& path, const LoadOptions& options) {
  const Deferred::Pause pause;
  const at::NoGradGuard no_grad;
  Engine& engine = sharded.engine();
  Communicator& communicator = engine.communicator();
  engine.settle();
  std::optional<SafetensorsSet> files;
  std::optional<LoadPlan> plan;
  std::vector<std::vector<std::string>> everyones;
  for (const auto& theirs : agreed(communicator, "tensors to load", [&] {
         engine.refuse_new_values("load_at_once");
         files.emplace(path);
         plan.emplace(engine, *files, options);
         return joined(description_of(*files, *plan));
       }))
    everyones.push_back(split(theirs, kRecord));
  check_alike(everyones);
  LoadReport report;
  report.missing = plan->missing;
  report.unexpected = plan->unexpected;
  const auto other_file = [&](const auto& theirs) { return theirs[1] != everyones[0][1]; };
  if (std::any_of(everyones.begin(), everyones.end(), other_file)) check_samples(communicator, *files, everyones, report);
  const auto tied = [](const LoadItem& item) { return item.entries.size() > 1; };
  if (std::any_of(plan->items.begin(), plan->items.end(), tied))
    agreed(communicator, "tied tensors to load", [&] {
      for (const auto& item : plan->items) check_tied(communicator, *files, item, report);
      return "";
    });
  std::set<const FileTensor*> used;
  for (const auto& item : plan->items)
    for (const auto& entry : item.entries) used.insert(entry.tensor);
  report.tensors = static_cast<int64_t>(used.size());
  read_all(engine, *files, *plan, report);
  return report;
}

}  // namespace tessera
