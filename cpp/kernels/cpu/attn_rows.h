// Attention of one query row over a range of keys, straight from the stored K and V rows: the inner
// part of decode. All query heads of a KV head are served together, so each K and V row is read
// from memory once, and the keys of one tile are scored before their values are touched.
#pragma once

#include "kernels/cpu/attn_common.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {

// Query heads that share one pass over a tile: what the registers hold.
constexpr int kMaxBlockHeads = 4;

// Scratch of one row: its queries, scaled, and its accumulators, both in load_step order.
struct RowScratch {
  float* q;             // [heads, kPaddedDim<D>]
  float* acc;           // [heads, kPaddedDim<D>]
  RowSoftmax* softmax;  // [heads]
};

template <int D>
constexpr int64_t row_scratch_bytes(int64_t num_heads) {
  return num_heads * (2 * kPaddedDim<D> * static_cast<int64_t>(sizeof(float)) +
                      static_cast<int64_t>(sizeof(RowSoftmax)));
}

template <int D>
RowScratch carve_row_scratch(void* memory, int64_t num_heads) {
  float* floats = static_cast<float*>(memory);
  return {.q = floats,
          .acc = floats + num_heads * kPaddedDim<D>,
          .softmax = reinterpret_cast<RowSoftmax*>(floats + 2 * num_heads * kPaddedDim<D>)};
}

// Scores of H heads (queries kPaddedDim<D> apart) for a tile's keys, four keys at a time.
// `k_offset` is the KV head's place in a row. The same rows of the next tile are prefetched on the
// way.
template <class T, int D, int H>
void score_tile(const float* q, const KeyRows<T>& rows, const KeyRows<T>* next, int64_t k_offset,
                float (*scores)[kTileKeys]) {
  for (int key = 0; key < rows.count; key += 4) {
    const T* row[4];
    for (int j = 0; j < 4; ++j) row[j] = rows.k[key + j] + k_offset;
    if (next != nullptr) {
      for (int j = 0; j < 4; ++j) prefetch_row(next->k[key + j] + k_offset, D * sizeof(T));
    }
    VecF acc[H][4];
    for (int h = 0; h < H; ++h) {
      for (int j = 0; j < 4; ++j) acc[h][j] = vzero();
    }
#pragma GCC unroll 4
    for (int step = 0; step < kSteps<D>; ++step) {
      for (int j = 0; j < 4; ++j) {
        const VecPair k = load_step<D>(row[j], step);
        for (int h = 0; h < H; ++h) {
          const float* query = q + h * kPaddedDim<D> + step * kPairLanes;
          acc[h][j] = vfma(vload(query), k.lo, acc[h][j]);
          acc[h][j] = vfma(vload(query + VecF::kLanes), k.hi, acc[h][j]);
        }
      }
    }
    for (int h = 0; h < H; ++h) vreduce_add4(acc[h], scores[h] + key);
  }
}

// acc = acc * factor + sum over the tile of weight * value, for kBlock steps of H heads.
template <class T, int D, int H, int kBlock>
void weigh_steps(const float (*weights)[kTileKeys], const float* factors, const KeyRows<T>& rows,
                 const KeyRows<T>* next, int64_t v_offset, int first_step, float* acc) {
  VecPair sum[H][kBlock];
  for (int h = 0; h < H; ++h) {
    const VecF factor = vset1(factors[h]);
    for (int s = 0; s < kBlock; ++s) {
      const float* at = acc + h * kPaddedDim<D> + (first_step + s) * kPairLanes;
      sum[h][s] = {vload(at) * factor, vload(at + VecF::kLanes) * factor};
    }
  }
  for (int key = 0; key < rows.count; ++key) {
    const T* row = rows.v[key] + v_offset;
    if (next != nullptr) prefetch_row(next->v[key] + v_offset, D * sizeof(T));
    for (int s = 0; s < kBlock; ++s) {
      const VecPair v = load_step<D>(row, first_step + s);
      for (int h = 0; h < H; ++h) {
        const VecF weight = vset1(weights[h][key]);
        sum[h][s].lo = vfma(weight, v.lo, sum[h][s].lo);
        sum[h][s].hi = vfma(weight, v.hi, sum[h][s].hi);
      }
    }
  }
  for (int h = 0; h < H; ++h) {
    for (int s = 0; s < kBlock; ++s) {
      float* at = acc + h * kPaddedDim<D> + (first_step + s) * kPairLanes;
      vstore(at, sum[h][s].lo);
      vstore(at + VecF::kLanes, sum[h][s].hi);
    }
  }
}

template <class T, int D, int H>
void weigh_tile(const float (*weights)[kTileKeys], const float* factors, const KeyRows<T>& rows,
                const KeyRows<T>* next, int64_t v_offset, float* acc) {
  // Twelve accumulators and the value pair they share fill sixteen registers.
  constexpr int kBlock = H == 4 ? 1 : H == 1 ? 4 : 2;
  int step = 0;
  for (; step + kBlock <= kSteps<D>; step += kBlock) {
    weigh_steps<T, D, H, kBlock>(weights, factors, rows, step == 0 ? next : nullptr, v_offset, step,
                                 acc);
  }
  if constexpr (constexpr int kRest = kSteps<D> % kBlock; kRest != 0) {
    weigh_steps<T, D, H, kRest>(weights, factors, rows, step == 0 ? next : nullptr, v_offset, step,
                                acc);
  }
}

// One tile, H query heads of one KV head.
template <class T, int D, int H>
void attend_block(const AttentionParams& params, const KeyRows<T>& rows, const KeyRows<T>* next,
                  int64_t kv_head, const float* q, float* acc, RowSoftmax* softmax) {
  float scores[H][kTileKeys];
  float factors[H];
  score_tile<T, D, H>(q, rows, next, kv_head * params.k_stride_head, scores);
  for (int h = 0; h < H; ++h) {
    if (params.softcap > 0.0f) cap_scores(scores[h], rows.count, params.softcap);
    factors[h] = softmax_tile(scores[h], rows.count, softmax[h]);
  }
  weigh_tile<T, D, H>(scores, factors, rows, next, kv_head * params.v_stride_head, acc);
}

// Runs query row `row` of a request over its visible keys in `range`, for the query heads of KV
// heads [kv_first, kv_last). Leaves in the scratch, for each head, the accumulated values in memory
// order (not yet divided by the sum) and the softmax state.
template <class T, int D>
void attend_row(const AttentionParams& params, const Request& request, int64_t row, KeyRange range,
                int64_t kv_first, int64_t kv_last, const RowScratch& scratch) {
  const int64_t group = params.num_q_heads / params.num_kv_heads;
  const int64_t num_heads = (kv_last - kv_first) * group;
  const VecF scale = vset1(params.scale);
  for (int64_t h = 0; h < num_heads; ++h) {
    const T* query = q_row<T>(params, request, row, kv_first * group + h);
    for (int step = 0; step < kSteps<D>; ++step) {
      const VecPair q = load_step<D>(query, step);
      float* at = scratch.q + h * kPaddedDim<D> + step * kPairLanes;
      vstore(at, q.lo * scale);
      vstore(at + VecF::kLanes, q.hi * scale);
    }
    for (int d = 0; d < kPaddedDim<D>; d += VecF::kLanes) {
      vstore(scratch.acc + h * kPaddedDim<D> + d, vzero());
    }
    scratch.softmax[h] = RowSoftmax{};
  }

  KeyWalk<T> walk{params, request, mask_row(params, request, row), range.first, range.last};
  KeyRows<T> tiles[2];
  int current = 0;
  walk.next(tiles[0]);
  while (tiles[current].count > 0) {
    const KeyRows<T>& rows = tiles[current];
    current ^= 1;
    walk.next(tiles[current]);
    const KeyRows<T>* next = tiles[current].count > 0 ? &tiles[current] : nullptr;
    int64_t h = 0;
    for (int64_t kv_head = kv_first; kv_head < kv_last; ++kv_head) {
      for (int64_t left = group; left > 0;) {
        // Blocks of 3 and 4 that leave no single head behind where that can be helped.
        const int64_t take = left <= kMaxBlockHeads ? left : left % 4 == 1 || left % 4 == 2 ? 3 : 4;
        const float* q = scratch.q + h * kPaddedDim<D>;
        float* acc = scratch.acc + h * kPaddedDim<D>;
        RowSoftmax* softmax = scratch.softmax + h;
        const KeyRows<T>* fetch = left == group ? next : nullptr;
        switch (take) {
          case 1:
            attend_block<T, D, 1>(params, rows, fetch, kv_head, q, acc, softmax);
            break;
          case 2:
            attend_block<T, D, 2>(params, rows, fetch, kv_head, q, acc, softmax);
            break;
          case 3:
            attend_block<T, D, 3>(params, rows, fetch, kv_head, q, acc, softmax);
            break;
          default:
            attend_block<T, D, 4>(params, rows, fetch, kv_head, q, acc, softmax);
            break;
        }
        h += take;
        left -= take;
      }
    }
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    restore_order<D, T>(scratch.acc + head * kPaddedDim<D>);
  }
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
