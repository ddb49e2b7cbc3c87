#include "tessera/engine/agreement.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/engine/deferred.h"

namespace tessera {
namespace {

constexpr char kField = '\x1f';
constexpr char kRecord = '\x1e';
// What can differ, in the order of a record's fields, and what to do about it.
constexpr std::pair<const char*, const char*> kFields[] = {
    {"the place in the model", "build the same model on all ranks"},
    {"the type", "build the same model on all ranks"},
    {"the shape", "build the same model on all ranks"},
    {"requires_grad", "freeze the same parameters on all ranks"},
    {"the initial values",
     "use the same seed on all ranks, load the same file, or set initial = Initial::broadcast to take rank 0's"}};

const std::string kNotCompared = "not compared";

std::string hash_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = tensor.detach().contiguous();
  const auto hash = XXH3_128bits(values.const_data_ptr(), values.nbytes());
  char digits[33];
  std::snprintf(digits, sizeof digits, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return text("hash ", digits);
}

std::vector<std::string> hashes_of(const UnitSpec& unit) {
  std::vector<std::string> hashes;
  for (const auto& values : values_of(tensors_of(unit.parameters))) hashes.push_back(hash_of(values));
  return hashes;
}

std::string describe(const std::vector<UnitSpec>& units, const std::string& options, Initial initial) {
  std::string records = options;
  for (const auto& unit : units) {
    const auto hashes = initial == Initial::verify ? hashes_of(unit) : std::vector(unit.parameters.size(), kNotCompared);
    for (size_t p = 0; p < unit.parameters.size(); ++p) {
      const auto& [name, tensor] = unit.parameters[p];
      records +=
          text(kRecord, "parameter '", name, "' in unit '", unit.name, "'", kField, c10::toString(tensor.scalar_type()),
               kField, words_of_shape(tensor.sizes()), kField, tensor.requires_grad() ? "true" : "false", kField, hashes[p]);
    }
  }
  return records;
}

[[noreturn]] void differ(const std::string& what, int rank, const std::string& first, const std::string& other,
                         const std::string& remedy) {
  throw AgreementError(
      text(what, " differs between ranks: rank 0 has ", first, ", rank ", rank, " has ", other, "; ", remedy));
}

void compare(int rank, const std::string& first, const std::string& other) {
  const auto ours = split(first, kRecord), theirs = split(other, kRecord);
  if (ours[0] != theirs[0])
    differ("how the model is to be sharded", rank, ours[0], theirs[0], "give all ranks the same options");
  for (size_t i = 1; i < std::min(ours.size(), theirs.size()); ++i) {
    const auto mine = split(ours[i], kField), its = split(theirs[i], kField);
    for (size_t field = 0; field < std::size(kFields); ++field)
      if (mine[field] != its[field])
        differ(field == 0 ? std::string("parameter number ") + std::to_string(i - 1)
                          : text(kFields[field].first, " of ", mine[0]),
               rank, mine[field], its[field], kFields[field].second);
  }
  if (ours.size() == theirs.size()) return;
  const size_t common = std::min(ours.size(), theirs.size());
  const std::string first_extra = split(ours.size() > common ? ours[common] : theirs[common], kField)[0];
  differ(text("the number of parameters (", first_extra, " is not on all)"), rank, std::to_string(ours.size() - 1),
         std::to_string(theirs.size() - 1), "build the same model on all ranks");
}

}  // namespace

void agree(Communicator& communicator, const std::vector<UnitSpec>& units, const std::string& options, Initial initial) {
  const auto everyones = communicator.all_gather("agreement on the sharded model", describe(units, options, initial));
  for (int r = 1; r < communicator.size(); ++r)
    if (everyones[static_cast<size_t>(r)] != everyones[0]) compare(r, everyones[0], everyones[static_cast<size_t>(r)]);
}

void broadcast_values(Communicator& communicator, UnitSpec& unit) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kPart = 8 << 20;
  const auto buffer = communicator.peer_readable("broadcast of initial values", Bytes(kPart));
  const auto offsets = communicator.all_gather("broadcast buffer", std::to_string(communicator.offset_of(buffer.get())));
  const int64_t source = std::stoll(offsets[0]);
  const bool root = communicator.rank() == Rank(0);
  for (auto& parameter : unit.parameters) {
    at::Tensor values = parameter.tensor.detach().contiguous();
    auto* bytes = static_cast<std::byte*>(values.data_ptr());
    const auto size = static_cast<int64_t>(values.nbytes());
    for (int64_t begin = 0; begin < size; begin += kPart) {
      const int64_t count = std::min(kPart, size - begin);
      if (root) std::memcpy(buffer.get(), bytes + begin, static_cast<size_t>(count));
      communicator.barrier("initial values are there");
      if (!root) communicator.read_peer(Rank(0), source, bytes + begin, Bytes(count));
      communicator.barrier("initial values are taken");
    }
    if (!values.is_same(parameter.tensor)) parameter.tensor.detach().copy_(values);
  }
}

}  // namespace tessera
