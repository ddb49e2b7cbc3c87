#include "tessera/engine/module_buffers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/packed.h"
#include "tessera/base/text.h"
#include "tessera/engine/hash.h"

namespace tessera {
namespace {

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.contiguous();
  return {static_cast<const char*>(values.const_data_ptr()), values.nbytes()};
}

// The tensor like buffer `name`, whose bytes these are, and which lives as long as they do.
at::Tensor view_of(std::string& bytes, const at::Tensor& like, const std::string& name) {
  if (bytes.size() != like.nbytes())
    throw AgreementError(text("buffer '", name, "' has ", like.nbytes(), " bytes here and ", bytes.size(),
                              " on another rank; resize it alike on all ranks, or set buffers = Buffers::local"));
  return at::from_blob(bytes.data(), like.sizes(), like.options());
}

}  // namespace

ModuleBuffers::ModuleBuffers(std::vector<std::pair<std::string, at::Tensor>> buffers, Buffers policy)
    : buffers_(std::move(buffers)), policy_(policy) {
  std::erase_if(buffers_, [](const auto& buffer) {
    return !buffer.second.defined() || !buffer.second.device().is_cpu() || buffer.second.layout() != at::kStrided;
  });
  marks_ = marks();
}

// What changes when a buffer is written: a hash of the contents, since batch_norm writes its running statistics without
// counting up their version. Of large ones (tables) a hash of lines here and there, with the version and the place: what
// writes without counting, writes all of it.
uint64_t ModuleBuffers::mark(const at::Tensor& buffer) {
  constexpr int64_t kSmall = 64 << 10, kLine = 64;
  const auto size = static_cast<int64_t>(buffer.nbytes());
  const auto* data = static_cast<const std::byte*>(buffer.const_data_ptr());
  const auto version = buffer.is_inference() ? 0 : static_cast<int64_t>(buffer._version());
  if (!buffer.is_non_overlapping_and_dense()) return static_cast<uint64_t>(version);
  if (size <= kSmall) return hash_of_bytes(data, size);
  struct {
    const void* place;
    int64_t version;
    std::byte lines[kSmall];
  } facts{data, version, {}};
  const int64_t count = kSmall / kLine;
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(facts.lines + i * kLine, data + i * (size - kLine) / (count - 1), static_cast<size_t>(kLine));
  return hash_of_bytes(&facts, sizeof facts);
}

std::vector<uint64_t> ModuleBuffers::marks() const {
  std::vector<uint64_t> all;
  for (const auto& [name, buffer] : buffers_) all.push_back(mark(buffer));
  return all;
}

// The name of the first of these buffers that differs between ranks, or "".
std::string ModuleBuffers::differing(Communicator& communicator, const std::vector<size_t>& which) {
  std::vector<uint64_t> hashes;
  for (const size_t i : which) hashes.push_back(hash_of_values(buffers_[i].second));
  std::vector<std::vector<uint64_t>> everyones;
  for (const auto& bytes : communicator.all_gather("hashes of buffers", packed(hashes)))
    everyones.push_back(unpacked_all<uint64_t>(bytes));
  for (size_t i = 0; i < which.size(); ++i)
    for (const auto& theirs : everyones)
      if (theirs.size() != hashes.size() || theirs[i] != everyones[0][i]) return buffers_[which[i]].first;
  return "";
}

// Throws AgreementError on all ranks, naming the first buffer whose name differs between them, or whose type or shape do
// unless buffers are local.
void ModuleBuffers::refuse_other_kinds(Communicator& communicator) const {
  std::string kinds;
  for (const auto& [name, buffer] : buffers_) {
    kinds += text("'", name, "'");
    if (policy_ != Buffers::local)
      kinds += text(" of type ", c10::toString(buffer.scalar_type()), " and shape ", words_of_shape(buffer.sizes()));
    kinds += '\n';
  }
  const auto everyones = communicator.all_gather("kinds of buffers", kinds);
  const auto first = split(everyones[0], '\n');
  for (size_t r = 1; r < everyones.size(); ++r) {
    const auto other = split(everyones[r], '\n');
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string ours = i < first.size() ? first[i] : "", theirs = i < other.size() ? other[i] : "";
      if (ours != theirs)
        throw AgreementError(text("the module's buffers differ between ranks: rank 0 has ", ours.empty() ? "no other" : ours,
                                  ", rank ", r, " has ", theirs.empty() ? "no other" : theirs,
                                  "; build the same model on all ranks"));
    }
  }
}

void ModuleBuffers::agree(Communicator& communicator, bool take_first) {
  if (communicator.size() == 1) return;
  refuse_other_kinds(communicator);
  if (buffers_.empty()) return;
  std::vector<size_t> which(buffers_.size());
  std::iota(which.begin(), which.end(), 0);
  if (!take_first) {
    const std::string name = differing(communicator, which);
    if (name.empty()) return;
    tell_that_differs(communicator, name, " at the start");
  }
  apply(communicator, take_first && policy_ != Buffers::local ? Buffers::broadcast : policy_, which, {});
}

// Buffers that some rank has written since they were last looked at.
std::vector<size_t> ModuleBuffers::written_anywhere(Communicator& communicator) {
  std::string written(buffers_.size(), '\0');
  const auto now = marks();
  for (size_t i = 0; i < buffers_.size(); ++i) written[i] = now[i] != marks_[i] ? 1 : 0;
  std::vector<size_t> which;
  const auto everyones = communicator.all_gather("written buffers", written);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    bool any = false;
    for (const auto& theirs : everyones) any |= theirs[i] != 0;
    if (any) which.push_back(i);
  }
  return which;
}

void ModuleBuffers::synchronise(Communicator& communicator, const std::vector<bool>& speakers) {
  if (buffers_.empty() || communicator.size() == 1 || (policy_ == Buffers::local && told_)) return;
  const auto which = written_anywhere(communicator);
  if (which.empty()) return;
  if (policy_ == Buffers::local)
    if (const std::string name = differing(communicator, which); !name.empty()) tell_that_differs(communicator, name, "");
  apply(communicator, policy_, which, speakers);
}

void ModuleBuffers::tell_that_differs(const Communicator& communicator, const std::string& name, std::string_view when) {
  told_ = true;
  if (communicator.rank() != Rank(0)) return;
  const char* then = policy_ == Buffers::local ? "stays each rank's own, as buffers = Buffers::local lets it"
                     : policy_ == Buffers::broadcast
                         ? "becomes rank 0's, as buffers = Buffers::broadcast asks"
                         : "becomes the ranks' mean (rank 0's where it holds integers), as buffers = Buffers::average asks";
  std::fprintf(stderr, "%s\n",
               text("tessera: buffer '", name, "' differs between ranks", when, "; it ", then, " (said once)").c_str());
}

void ModuleBuffers::apply(Communicator& communicator, Buffers policy, const std::vector<size_t>& which,
                          const std::vector<bool>& speakers) {
  const at::NoGradGuard no_grad;
  const auto speaks_at_all = [&](size_t r) { return speakers.empty() || speakers[r]; };
  const auto me = static_cast<size_t>(communicator.rank().value);
  size_t first = 0;
  while (!speaks_at_all(first)) ++first;
  for (const size_t i : policy == Buffers::local ? std::vector<size_t>{} : which) {
    auto& [name, buffer] = buffers_[i];
    const bool mean = policy == Buffers::average && buffer.is_floating_point();
    const bool speaks = mean ? speaks_at_all(me) : me == first;
    auto everyones = communicator.all_gather(text("buffer ", name), speaks ? bytes_of(buffer) : "");
    if (mean) {
      at::Tensor sum = view_of(everyones[first], buffer, name).to(at::kDouble);
      double count = 1;
      for (size_t r = first + 1; r < everyones.size(); ++r) {
        if (!speaks_at_all(r)) continue;
        sum += view_of(everyones[r], buffer, name);
        ++count;
      }
      buffer.copy_(sum.div_(count));
    } else if (!speaks) {
      buffer.copy_(view_of(everyones[first], buffer, name));
    }
  }
  marks_ = marks();
}

}  // namespace tessera
