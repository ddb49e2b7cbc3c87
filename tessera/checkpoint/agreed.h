#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

/// Runs `work` on each rank and returns what it returned, by rank. If it throws on some, all ranks throw an error of the
/// first one's class, with its words, the rank (unless all say the same) and `behind`. Collective.
std::vector<std::string> agreed(Communicator& communicator, const std::string& label,
                                const std::function<std::string()>& work, const std::string& behind = "");

}  // namespace tessera
