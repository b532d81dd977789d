// What decode and prefill kernels share: ranges of keys, where a key lies, its logit.
#pragma once

#include <cstdint>

#include "kernels/attention/attn_params.h"

namespace astrai::kernels {

struct KeyRange {
  int begin;
  int end;  // exclusive
};

// Page and slot of a key. Dense keys are slots of page 0, counted from the request's first key.
struct KeyPlace {
  int page;
  int slot;
};

// `page_shift` is log2 of the page size when that is a power of two, else negative; `pages` the
// request's page list.
__device__ inline KeyPlace place_key(const AttentionParams& attn, int page_shift,
                                     const int32_t* pages, int key) {
  if (attn.page_size == 0) return {0, key};
  if (page_shift >= 0) {
    return {pages[key >> page_shift], key & ((1 << page_shift) - 1)};
  }
  const unsigned page_size = static_cast<unsigned>(attn.page_size);
  const unsigned index = static_cast<unsigned>(key) / page_size;
  return {pages[index], static_cast<int>(static_cast<unsigned>(key) - index * page_size)};
}

// Logit of a raw product q.k.
__device__ inline float logit(const AttentionParams& attn, float product) {
  const float scaled = product * attn.scale;
  return attn.softcap > 0.0f ? attn.softcap * tanhf(scaled / attn.softcap) : scaled;
}

}  // namespace astrai::kernels
