// One task for the keys and one for the values. Tokens are copied in order, so that of two tokens
// with the same slot the later one is kept.
#include "kernels/kv_cache/kv_write.h"

#include <cstring>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/parallel_rows.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

// Strides in bytes.
struct Copy {
  const char* rows;
  char* pages;
  int64_t row_stride_token, row_stride_head;
  int64_t page_stride_page, page_stride_token, page_stride_head;
};

void write_rows(const KvWriteParams& params, const Copy& copy) {
  int64_t num_chunks = params.num_kv_heads;
  int64_t chunk_bytes = params.head_dim * dtype_bytes(params.dtype);
  if (copy.row_stride_head == chunk_bytes && copy.page_stride_head == chunk_bytes) {
    chunk_bytes *= num_chunks;
    num_chunks = 1;
  }
  for (int64_t t = 0; t < params.num_tokens; ++t) {
    const int64_t slot = params.slot_mapping[t];
    if (slot < 0) continue;
    const char* from = copy.rows + t * copy.row_stride_token;
    char* to = copy.pages + slot / params.page_size * copy.page_stride_page +
               slot % params.page_size * copy.page_stride_token;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      std::memcpy(to + chunk * copy.page_stride_head, from + chunk * copy.row_stride_head,
                  static_cast<size_t>(chunk_bytes));
    }
  }
}

}  // namespace

void kv_write(const KvWriteParams& params) {
  const int64_t item = dtype_bytes(params.dtype);
  const Copy copies[2] = {
      {.rows = static_cast<const char*>(params.k),
       .pages = static_cast<char*>(params.k_pages),
       .row_stride_token = params.k_stride_token * item,
       .row_stride_head = params.k_stride_head * item,
       .page_stride_page = params.k_pages_stride_page * item,
       .page_stride_token = params.k_pages_stride_token * item,
       .page_stride_head = params.k_pages_stride_head * item},
      {.rows = static_cast<const char*>(params.v),
       .pages = static_cast<char*>(params.v_pages),
       .row_stride_token = params.v_stride_token * item,
       .row_stride_head = params.v_stride_head * item,
       .page_stride_page = params.v_pages_stride_page * item,
       .page_stride_token = params.v_pages_stride_token * item,
       .page_stride_head = params.v_pages_stride_head * item},
  };
  const int64_t bytes = 2 * params.num_tokens * params.num_kv_heads * params.head_dim * item;
  parallel_rows(2, bytes, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) write_rows(params, copies[i]);
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
