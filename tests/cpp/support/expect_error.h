// Error texts are part of the contract: tests compare them whole.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace astrai::testing {

// Runs fn, which must throw an E with exactly this text.
template <class E, class Fn>
void expect_error(const std::string& text, Fn&& fn) {
  try {
    fn();
  } catch (const E& error) {
    EXPECT_EQ(error.what(), text);
    return;
  }
  ADD_FAILURE() << "nothing was thrown; expected: " << text;
}

}  // namespace astrai::testing
