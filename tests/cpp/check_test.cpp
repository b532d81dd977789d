#include "common/check.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

namespace astrai {
namespace {

TEST(Concat, JoinsTexts) {
  const std::string owned = "owned";
  EXPECT_EQ(concat("a ", owned, std::string_view(" view"), '!'), "a owned view!");
  EXPECT_EQ(concat(), "");
}

TEST(Concat, WritesNumbersInFull) {
  EXPECT_EQ(concat(std::numeric_limits<int64_t>::min(), ' ', std::numeric_limits<uint64_t>::max()),
            "-9223372036854775808 18446744073709551615");
  EXPECT_EQ(concat(int8_t{-5}, ' ', uint8_t{200}, ' ', true), "-5 200 1");
}

TEST(Concat, WritesFloatsShort) {
  EXPECT_EQ(concat(1.5f, ' ', 0.1, ' ', 3.0, ' ', 1e300), "1.5 0.1 3 1e+300");
  EXPECT_EQ(concat(std::numeric_limits<double>::infinity()), "inf");
}

TEST(Check, EvaluatesItsMessageOnlyOnFailure) {
  int evaluated = 0;
  ASTRAI_CHECK_ARG(true, ++evaluated);
  EXPECT_EQ(evaluated, 0);
  EXPECT_THROW(ASTRAI_CHECK_ARG(false, ++evaluated), std::invalid_argument);
  EXPECT_THROW(ASTRAI_CHECK_STATE(false, ++evaluated), std::runtime_error);
  EXPECT_EQ(evaluated, 2);
}

}  // namespace
}  // namespace astrai
