#pragma once

#include <cstdlib>
#include <map>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::bench {

/// `--name value` pairs of a benchmark's command line over the defaults given; an unknown name is a ConfigError.
class Arguments {
 public:
  Arguments(int count, char** words, std::map<std::string, std::string> defaults) : values_(std::move(defaults)) {
    for (int i = 1; i < count; i += 2) {
      const std::string name = words[i];
      const auto found = name.starts_with("--") ? values_.find(name.substr(2)) : values_.end();
      if (found == values_.end()) throw ConfigError(text("unknown option '", name, "'; there are:", names()));
      if (i + 1 == count) throw ConfigError(text("option ", name, " lacks its value"));
      found->second = words[i + 1];
    }
  }

  const std::string& word(const std::string& name) const { return values_.at(name); }

  int64_t number(const std::string& name) const {
    char* end = nullptr;
    const int64_t value = std::strtoll(word(name).c_str(), &end, 10);
    if (word(name).empty() || *end != '\0' || value < 0)
      throw ConfigError(text("option ", name, " must be a whole number, 0 or more, but is '", word(name), "'"));
    return value;
  }

 private:
  std::string names() const {
    std::string all;
    for (const auto& [name, value] : values_) all += " --" + name;
    return all;
  }

  std::map<std::string, std::string> values_;
};

}  // namespace tessera::bench
