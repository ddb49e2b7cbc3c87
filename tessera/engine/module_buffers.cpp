#include "tessera/engine/module_buffers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <cstdio>

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

// The tensor like `like` whose bytes are these, and which lives as long as they do.
at::Tensor view_of(std::string& bytes, const at::Tensor& like) {
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

// What changes when a buffer is written: of small ones a hash of the contents, since batch_norm writes its running
// statistics without counting up their version; of large ones (tables) the version.
uint64_t ModuleBuffers::mark(const at::Tensor& buffer) {
  constexpr size_t kSmall = 64 << 10;
  return buffer.nbytes() <= kSmall && buffer.is_contiguous()
             ? hash_of_bytes(buffer.const_data_ptr(), static_cast<int64_t>(buffer.nbytes()))
             : buffer._version();
}

std::vector<uint64_t> ModuleBuffers::marks() const {
  std::vector<uint64_t> all;
  for (const auto& [name, buffer] : buffers_) all.push_back(mark(buffer));
  return all;
}

// The name of the first of these buffers that differs between ranks, or "".
std::string ModuleBuffers::differing(Communicator& communicator, std::vector<size_t> which) {
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

void ModuleBuffers::agree(Communicator& communicator, bool verify) {
  if (policy_ == Buffers::local || communicator.size() == 1) return;
  std::vector<size_t> all(buffers_.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = i;
  if (verify) {
    const std::string name = differing(communicator, all);
    if (name.empty()) return;
    throw AgreementError(text("the initial values of buffer '", name,
                              "' differ between ranks; use the same seed on all ranks, load the same file, set initial = "
                              "Initial::broadcast to take rank 0's, or buffers = Buffers::local to keep each rank's own"));
  }
  const at::NoGradGuard no_grad;
  for (const size_t i : all) {
    at::Tensor& buffer = buffers_[i].second;
    auto everyones =
        communicator.all_gather(text("buffer ", buffers_[i].first), communicator.rank() == Rank(0) ? bytes_of(buffer) : "");
    if (communicator.rank() != Rank(0)) buffer.copy_(view_of(everyones[0], buffer));
  }
  marks_ = marks();
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
  const at::NoGradGuard no_grad;
  if (policy_ == Buffers::local) {
    const std::string name = differing(communicator, which);
    marks_ = marks();
    if (name.empty()) return;
    told_ = true;
    if (communicator.rank() == Rank(0))
      std::fprintf(stderr, "tessera: buffer '%s' differs between ranks, as buffers = Buffers::local lets it (said once)\n",
                   name.c_str());
    return;
  }
  const auto speaks_at_all = [&](size_t r) { return speakers.empty() || speakers[r]; };
  const auto me = static_cast<size_t>(communicator.rank().value);
  size_t first = 0;
  while (!speaks_at_all(first)) ++first;
  for (const size_t i : which) {
    at::Tensor& buffer = buffers_[i].second;
    const bool mean = policy_ == Buffers::average && buffer.is_floating_point();
    const bool speaks = mean ? speaks_at_all(me) : me == first;
    auto everyones = communicator.all_gather(text("buffer ", buffers_[i].first), speaks ? bytes_of(buffer) : "");
    if (mean) {
      at::Tensor sum = view_of(everyones[first], buffer).to(at::kDouble);
      double count = 1;
      for (size_t r = first + 1; r < everyones.size(); ++r) {
        if (!speaks_at_all(r)) continue;
        sum += view_of(everyones[r], buffer);
        ++count;
      }
      buffer.copy_(sum.div_(count));
    } else if (!speaks) {
      buffer.copy_(view_of(everyones[first], buffer));
    }
  }
  marks_ = marks();
}

}  // namespace tessera
