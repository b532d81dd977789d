// What the CUDA launchers ask about the memory of an attention problem. Host code.
#pragma once

#include <cstdint>

#include "kernels/attention/attn_params.h"

namespace astrai::kernels {

// True when every row of the tensor starts at a multiple of `elements` elements.
bool q_rows_aligned(const AttentionParams& params, int64_t elements);
bool kv_rows_aligned(const AttentionParams& params, int64_t elements);
bool out_rows_aligned(const AttentionParams& params, int64_t elements);

// log2 of the page size when that is a power of two, else -1.
int page_shift(int64_t page_size);

}  // namespace astrai::kernels
