#include "cli/config_file.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <type_traits>

#include "models/text_file.h"
#include "tessera/base/error.h"
#include "tessera/base/suggest.h"
#include "tessera/base/text.h"

namespace tessera::cli {
namespace {

std::string described(const toml::node& node) {
  std::ostringstream out;
  if (const auto* whole = node.as_integer())
    out << "the whole number " << whole->get();
  else if (const auto* real = node.as_floating_point())
    out << "the number " << *real;
  else if (const auto* truth = node.as_boolean())
    out << (truth->get() ? "true" : "false");
  else if (const auto* word = node.as_string())
    out << "the string \"" << word->get() << '"';
  else if (node.is_table())
    out << "a table";
  else if (node.is_array())
    out << "an array";
  else
    out << "a date or time";
  return out.str();
}

// Whether the node has a value that the target can hold; it gets that then. A whole number will do where any number is
// wanted.
bool store(const toml::node& node, int* target) {
  const auto* value = node.as_integer();
  if (value == nullptr || value->get() != static_cast<int>(value->get())) return false;
  *target = static_cast<int>(value->get());
  return true;
}

bool store(const toml::node& node, double* target) {
  if (const auto* whole = node.as_integer())
    *target = static_cast<double>(whole->get());
  else if (const auto* real = node.as_floating_point())
    *target = real->get();
  else
    return false;
  return true;
}

template <class Value>
bool store(const toml::node& node, Value* target) {
  const auto* value = node.as<Value>();
  if (value == nullptr) return false;
  *target = value->get();
  return true;
}

class Reader {
 public:
  Reader(const std::filesystem::path& file, std::span<const TrainOption> options) : file_(file), options_(options) {}

  std::set<std::string> read() {
    const toml::table table = parse();
    for (auto&& [key, node] : table) set(std::string(key.str()), node);
    return set_;
  }

 private:
  [[noreturn]] void fail(const toml::source_region& place, const std::string& what) const {
    throw ConfigError(text("file ", file_, ", line ", place.begin.line, ": ", what));
  }

  toml::table parse() const {
    const std::string bytes = models::read_file(file_);
    try {
      return toml::parse(bytes, file_.string());
    } catch (const toml::parse_error& error) {
      fail(error.source(), std::string(error.description()));
    }
  }

  void set(const std::string& key, const toml::node& node) {
    std::string name = key;
    std::replace(name.begin(), name.end(), '_', '-');
    const auto option =
        std::find_if(options_.begin(), options_.end(), [&](const TrainOption& each) { return each.name == name; });
    if (option == options_.end()) refuse_unknown(key, node);
    if (!set_.insert(name).second)
      fail(node.source(), text("key '", key, "' is given twice, once with dashes and once with underscores"));
    if (!std::visit([&](auto* target) { return store(node, target); }, option->target))
      fail(node.source(), text("key '", key, "' wants ", kind_of(*option), ", but got ", described(node)));
  }

  [[noreturn]] void refuse_unknown(const std::string& key, const toml::node& node) const {
    std::vector<std::string> names;
    for (const auto& option : options_) names.push_back(option.name);
    fail(node.source(), text("unknown key '", key, "'",
                             node.is_table() ? ", a table; keys stand at the top level" : did_you_mean(key, names)));
  }

  const std::filesystem::path& file_;
  std::span<const TrainOption> options_;
  std::set<std::string> set_;
};

}  // namespace

std::set<std::string> read_config(const std::filesystem::path& file, std::span<const TrainOption> options) {
  return Reader(file, options).read();
}

}  // namespace tessera::cli
