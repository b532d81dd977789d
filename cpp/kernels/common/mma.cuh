// Warp-level matrix instructions, m16n8k16 with fp32 accumulation (compute capability 8.0 and
// later).
//
// Fragments, for lane l with row = l / 4 and column pair c = 2 * (l % 4):
//   A [16 x 16]  a0 (row, c..c+1)  a1 (row + 8, c..)  a2 (row, c + 8..)  a3 (row + 8, c + 8..)
//   B [16 x 8]   b0 (k = c..c+1, n = row)             b1 (k = c + 8.., n = row)
//   C [16 x 8]   c0, c1 (row, c..c+1)                 c2, c3 (row + 8, c..c+1)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace astrai::kernels {

template <class T>
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);

template <>
__device__ inline void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices of 16-bit elements; lanes 8i .. 8i + 7 give the row addresses of the
// i-th. The transposed form hands each lane the elements of a column.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Where 16-byte chunk `chunk` of row `row` lies in a tile whose rows have kChunks chunks, so that
// the eight rows of an ldmatrix fall into eight different bank groups. The permutation stays inside
// the row: a row of 4 chunks (head_dim 32) permutes 4, one of 10 permutes pairs.
template <int kChunks>
__device__ inline int swizzled_chunk(int row, int chunk) {
  static_assert(kChunks % 2 == 0, "a row needs an even number of chunks");
  if constexpr (kChunks % 8 == 0) {
    return chunk ^ (row & 7);
  } else if constexpr (kChunks % 4 == 0) {
    return chunk ^ ((row >> 1) & 3);
  } else {
    return chunk ^ ((row >> 2) & 1);
  }
}

// From the address of a swizzled chunk 0 or 1 to that of the chunk `chunks` (an even number)
// further on in its row; rows start at multiples of a row's size. One instruction at most, so that
// loops need not keep an address for each.
template <int kChunks>
__device__ inline uint32_t advance_chunks(uint32_t address, int chunks) {
  constexpr unsigned kSwizzled = kChunks % 8 == 0 ? 0x60u : kChunks % 4 == 0 ? 0x20u : 0u;
  const unsigned bytes = static_cast<unsigned>(chunks) * 16;
  return (address ^ (bytes & kSwizzled)) + (bytes & ~kSwizzled);
}

}  // namespace astrai::kernels
