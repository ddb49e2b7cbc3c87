#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tessera/base/types.h"
#include "tessera/engine/fully_shard.h"

namespace tessera {

struct LoadOptions {
  /// true: the files have every parameter and buffer of the model, and nothing else. false: what the files lack keeps its
  /// values, what the model lacks is left; LoadReport lists both.
  bool strict = true;
  /// Names (fnmatch patterns, of the model or in the files) that may lack their counterpart though `strict`: buffers that
  /// are computed at construction, say.
  std::vector<std::string> optional = {};
  /// The name in the files of what the model calls by this name; default: the same.
  std::function<std::string(const std::string& name)> rename = {};
};

/// What load_at_once did.
struct LoadReport {
  Bytes read;           ///< of tensors' data, by this rank: what its parts have, and gaps that cost less than another call
  int64_t reads = 0;    ///< calls that read it
  int64_t tensors = 0;  ///< of the files that were used, on all ranks together
  std::vector<std::string> missing;     ///< the model's names that the files lack
  std::vector<std::string> unexpected;  ///< the files' names that the model lacks
};

/// Gives the parameters and buffers of a sharded model the values in safetensors files, of which each rank reads no more
/// than its parts of the parameters (those that its optimizer updates), and buffers and ignored parameters whole.
///
/// `path`: a file, an index (*.safetensors.index.json), or a folder; see SafetensorsSet. The same, or copies, on all ranks.
/// Names are those of the model; a tied parameter has several, of which the files need one (if they have more, these must
/// have the same values). Shapes must be the model's; a complex parameter's tensor is C64, or real with one more dim of
/// size 2. Floating-point values of any type become the type of the master parameter and, each rounded once, of the working
/// parameter; integers and truth values are taken where the model's type has them all. What optimizers keep stays.
///
/// Throws, on all ranks alike and before anything is written: DataError for files (see SafetensorsSet); ConfigError that
/// lists what is missing, unexpected, of another shape or of a type that can't be converted; AgreementError where ranks were
/// given different files or options; GuardError in backward, in a scope, or where a parameter was replaced. A file that
/// can't be read any more while it is read is a DataError that says that some parameters are written. Collective. O(this
/// rank's bytes) time, and 8 MiB besides the largest buffer that is not contiguous.
LoadReport load_at_once(Sharded& sharded, const std::filesystem::path& path, const LoadOptions& options = {});

}  // namespace tessera
