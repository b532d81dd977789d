// Takes an attention case to the kernels: lays its numbers out in poisoned memory on a target,
// calls the entry point, and checks the answer and what must not have been touched.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "support/attn_case.h"
#include "support/test_target.h"

namespace astrai::testing {

struct AttnResult {
  std::vector<double> out;         // [total_q, Hq, D]
  std::vector<double> lse;         // [total_q, Hq]; empty when not asked for
  std::vector<uint8_t> out_bytes;  // the same, bit for bit
  std::vector<uint8_t> lse_bytes;
  bool surroundings_intact = true;  // nothing outside out, lse and the partials was written
  int64_t launches = 0;
};

AttnResult run_attention(const TestTarget& target, const AttnCase& test,
                         const AttnNumbers& numbers);

// Runs the case on every target and compares with the exact answer: non-finite values first, then
// the rest within tolerance. Reports at most a few failures per case, with its name.
void expect_exact(const AttnCase& test);
void expect_exact(const AttnCase& test, const AttnNumbers& numbers);

// Runs the case on every target and calls `check` with each result.
void for_each_result(const AttnCase& test, const AttnNumbers& numbers,
                     const std::function<void(const AttnResult&)>& check);

// Same numbers, every poison: all results must be the same bits.
void expect_poison_is_not_read(AttnCase test);

}  // namespace astrai::testing
