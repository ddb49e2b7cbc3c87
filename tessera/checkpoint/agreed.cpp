#include "tessera/checkpoint/agreed.h"

#include <algorithm>
#include <exception>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

// How it ended, as the first letter of what a rank says.
constexpr char kGood = 'g', kConfig = 'c', kData = 'd', kSystem = 's', kGuard = 'u', kAgreement = 'a', kOther = 'o';

std::string outcome_of(const std::function<std::string()>& work) {
  const auto failed = [](char how, const std::exception& error) { return how + std::string(error.what()); };
  try {
    return kGood + work();
  } catch (const ConfigError& error) {
    return failed(kConfig, error);
  } catch (const DataError& error) {
    return failed(kData, error);
  } catch (const SystemError& error) {
    return failed(kSystem, error);
  } catch (const GuardError& error) {
    return failed(kGuard, error);
  } catch (const AgreementError& error) {
    return failed(kAgreement, error);
  } catch (const std::exception& error) {
    return failed(kOther, error);
  }
}

[[noreturn]] void fail(char how, const std::string& words) {
  switch (how) {
    case kConfig:
      throw ConfigError(words);
    case kData:
      throw DataError(words);
    case kSystem:
      throw SystemError(words);
    case kGuard:
      throw GuardError(words);
    case kAgreement:
      throw AgreementError(words);
    default:
      throw Error(words);
  }
}

}  // namespace

std::vector<std::string> agreed(Communicator& communicator, const std::string& label,
                                const std::function<std::string()>& work, const std::string& behind) {
  auto outcomes = communicator.all_gather(label, outcome_of(work));
  const auto bad = std::find_if(outcomes.begin(), outcomes.end(), [](const auto& each) { return each[0] != kGood; });
  if (bad != outcomes.end()) {
    const bool everywhere = std::all_of(outcomes.begin(), outcomes.end(), [&](const auto& each) { return each == *bad; });
    fail((*bad)[0], text(everywhere ? "" : text("rank ", bad - outcomes.begin(), ": "), bad->substr(1), behind));
  }
  for (auto& each : outcomes) each.erase(0, 1);
  return outcomes;
}

}  // namespace tessera
