#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::test {

inline std::string words_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "what is no std::exception";
  }
}

/// what() of the `Wanted` that `action` throws. Fails the test, and returns "" or the other error's words, if it throws
/// nothing or another.
template <class Wanted, class Action>
std::string refusal(Action&& action) {
  try {
    action();
  } catch (const Wanted& error) {
    return error.what();
  } catch (...) {
    std::string words = words_of(std::current_exception());
    ADD_FAILURE() << "an error of another type: " << words;
    return words;
  }
  ADD_FAILURE() << "no error";
  return "";
}

/// Every one of `words` is in `message`.
inline void expect_words(std::string_view message, const std::vector<std::string>& words) {
  for (const auto& word : words)
    EXPECT_NE(message.find(word), std::string_view::npos) << "'" << word << "' is not in: " << message;
}

}  // namespace tessera::test
