// Attention of one query row over a range of keys, straight from the stored K and V rows: the inner
// part of decode.
//
// Keys pass in tiles: all scores of a tile, then all weights, then all values. Within a tile every
// query head of every KV head takes part, so that K rows are read whole and in memory order. V is
// read head by head, to keep sums in registers; its rows are prefetched, whole and in order, while
// the keys are scored, and the next tile's keys while the values are weighed. Reading a few heads'
// slices of each row instead gets half of the memory's speed.
#pragma once

#include "kernels/cpu/attn_common.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {

// Query heads that share one pass over a tile: what the registers hold.
constexpr int kMaxBlockHeads = 4;

// K bytes of one tile and one pass over its heads; V takes as many. Both fit the second-level
// cache.
constexpr int64_t kMaxTileBytes = 64 * 1024;

// Scratch of one row. Its queries, scaled, and its accumulators are in load_row order.
struct RowScratch {
  float* q;                    // [heads, kPaddedDim<D>]
  float* acc;                  // [heads, kPaddedDim<D>]
  float (*scores)[kTileKeys];  // [heads]
  RowSoftmax* softmax;         // [heads]
  float* factors;              // [heads]
};

template <int D>
constexpr int64_t row_scratch_bytes(int64_t num_heads) {
  return num_heads * ((2 * kPaddedDim<D> + kTileKeys + 1) * static_cast<int64_t>(sizeof(float)) +
                      static_cast<int64_t>(sizeof(RowSoftmax)));
}

template <int D>
RowScratch carve_row_scratch(void* memory, int64_t num_heads) {
  float* floats = static_cast<float*>(memory);
  float* scores = floats + 2 * num_heads * kPaddedDim<D>;
  float* factors = scores + num_heads * kTileKeys;
  return {.q = floats,
          .acc = floats + num_heads * kPaddedDim<D>,
          .scores = reinterpret_cast<float(*)[kTileKeys]>(scores),
          .softmax = reinterpret_cast<RowSoftmax*>(factors + num_heads),
          .factors = factors};
}

// Brings rows of a tile nearer, a few at a time: from each row `num_slices` slices of slice_bytes.
struct Prefetcher {
  const void* const* rows;
  int64_t offset;  // bytes, of the first slice
  int64_t stride;  // bytes, from slice to slice
  int64_t num_slices;
  int64_t slice_bytes;
  int next;   // row
  int count;  // rows

  void fetch(int num_rows) {
    const int stop = next + num_rows < count ? next + num_rows : count;
    for (; next < stop; ++next) {
      const char* slice = static_cast<const char*>(rows[next]) + offset;
      for (int64_t i = 0; i < num_slices; ++i, slice += stride) {
        for (int64_t byte = 0; byte < slice_bytes; byte += 64) __builtin_prefetch(slice + byte);
      }
    }
  }
};

// Of KV heads [first, last); one slice where they follow one another in memory.
template <class T, int D>
Prefetcher make_prefetcher(const T* const* rows, int count, int64_t stride_head, int64_t first,
                           int64_t last) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  const bool dense = stride_head == D;
  return {.rows = reinterpret_cast<const void* const*>(rows),
          .offset = first * stride_head * kBytes,
          .stride = stride_head * kBytes,
          .num_slices = dense ? 1 : last - first,
          .slice_bytes = (dense ? last - first : 1) * D * kBytes,
          .next = 0,
          .count = count};
}

// Scores of H heads (queries kPaddedDim<D> apart) for four keys.
template <class T, int D, int H>
inline void score_four(const float* q, const T* const* rows, int64_t offset,
                       float (*scores)[kTileKeys], int key) {
  const T* row[4];
  for (int j = 0; j < 4; ++j) row[j] = rows[key + j] + offset;
  VecF acc[H][4];
  for (int h = 0; h < H; ++h) {
    for (int j = 0; j < 4; ++j) acc[h][j] = vzero();
  }
  // With three heads: twelve accumulators, three queries, one key.
#pragma GCC unroll 16
  for (int i = 0; i < 2 * kPairs<D>; ++i) {
    VecF query[H];
    for (int h = 0; h < H; ++h) query[h] = vload(q + h * kPaddedDim<D> + i * VecF::kLanes);
    for (int j = 0; j < 4; ++j) {
      const VecF k = load_row<D>(row[j], i / 2, i % 2);
      for (int h = 0; h < H; ++h) acc[h][j] = vfma(query[h], k, acc[h][j]);
    }
  }
  for (int h = 0; h < H; ++h) vreduce_add4(acc[h], scores[h] + key);
}

// The same for all `group` heads of a KV head: threes and twos, whose accumulators fit the
// registers.
template <class T, int D>
void score_group(const float* q, const T* const* rows, int64_t offset, int64_t group,
                 float (*scores)[kTileKeys], int key) {
  while (group > 0) {
    const int64_t take = group == 1 ? 1 : group % 3 == 0 || group >= 5 ? 3 : 2;
    switch (take) {
      case 1:
        score_four<T, D, 1>(q, rows, offset, scores, key);
        break;
      case 2:
        score_four<T, D, 2>(q, rows, offset, scores, key);
        break;
      default:
        score_four<T, D, 3>(q, rows, offset, scores, key);
        break;
    }
    q += take * kPaddedDim<D>;
    scores += take;
    group -= take;
  }
}

// Keys whose values are weighed between two looks at the prefetcher.
constexpr int kKeysPerFetch = 16;

// acc = acc * factor + sum over the tile of weight * value, for kBlock pairs of vectors of H heads.
template <class T, int D, int H, int kBlock>
void weigh_pairs(const float (*weights)[kTileKeys], const float* factors, const KeyRows<T>& rows,
                 int64_t v_offset, int first_pair, Prefetcher& prefetcher, int fetch_rows,
                 float* acc) {
  // One flat list of accumulators, with every loop over it unrolled: they must stay in registers.
  constexpr int kVecs = 2 * kBlock;
  VecF sum[H * kVecs];
  float* at[H];
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) {
    at[h] = acc + h * kPaddedDim<D> + first_pair * kPairLanes;
    const VecF factor = vset1(factors[h]);
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      sum[h * kVecs + i] = vload(at[h] + i * VecF::kLanes) * factor;
    }
  }
  for (int first = 0; first < rows.count; first += kKeysPerFetch) {
    prefetcher.fetch(fetch_rows);
    const int last = static_cast<int>(min_of(first + kKeysPerFetch, rows.count));
    for (int key = first; key < last; ++key) {
      const T* row = rows.v[key] + v_offset;
      VecF weight[H];
#pragma GCC unroll 8
      for (int h = 0; h < H; ++h) weight[h] = vset1(weights[h][key]);
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) {
        const VecF v = load_row<D>(row, first_pair + i / 2, i % 2);
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) sum[h * kVecs + i] = vfma(weight[h], v, sum[h * kVecs + i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) vstore(at[h] + i * VecF::kLanes, sum[h * kVecs + i]);
  }
}

template <class T, int D, int H>
void weigh_tile(const float (*weights)[kTileKeys], const float* factors, const KeyRows<T>& rows,
                int64_t v_offset, Prefetcher& prefetcher, int fetch_rows, float* acc) {
  // Eight to twelve accumulators keep the arithmetic units busy; with the weights and one value
  // they fit sixteen registers.
  constexpr int kBlock = H == 1 ? 4 : H == 4 ? 1 : 2;
  int pair = 0;
  for (; pair + kBlock <= kPairs<D>; pair += kBlock) {
    weigh_pairs<T, D, H, kBlock>(weights, factors, rows, v_offset, pair, prefetcher, fetch_rows,
                                 acc);
  }
  if constexpr (constexpr int kRest = kPairs<D> % kBlock; kRest != 0) {
    weigh_pairs<T, D, H, kRest>(weights, factors, rows, v_offset, pair, prefetcher, fetch_rows,
                                acc);
  }
}

// Values of all `group` heads of a KV head.
template <class T, int D>
void weigh_group(const RowScratch& scratch, int64_t head, int64_t group, const KeyRows<T>& rows,
                 int64_t v_offset, Prefetcher& prefetcher, int fetch_rows) {
  while (group > 0) {
    const auto weigh = [&]<int H>() {
      weigh_tile<T, D, H>(scratch.scores + head, scratch.factors + head, rows, v_offset, prefetcher,
                          fetch_rows, scratch.acc + head * kPaddedDim<D>);
    };
    // Threes and fours that leave no single head behind where that can be helped.
    const int64_t take = group <= kMaxBlockHeads ? group : group % 4 == 1 || group % 4 == 2 ? 3 : 4;
    switch (take) {
      case 1:
        weigh.template operator()<1>();
        break;
      case 2:
        weigh.template operator()<2>();
        break;
      case 3:
        weigh.template operator()<3>();
        break;
      default:
        weigh.template operator()<4>();
        break;
    }
    head += take;
    group -= take;
  }
}

// One tile for the query heads of KV heads [first, last), whose first query head is `head` in the
// scratch. `next` is the tile that follows, if any.
template <class T, int D>
void attend_tile(const AttentionParams& params, const KeyRows<T>& rows, const KeyRows<T>& next,
                 int64_t first, int64_t last, int64_t head, const RowScratch& scratch) {
  const int64_t group = params.num_q_heads / params.num_kv_heads;
  const int64_t num_heads = (last - first) * group;
  Prefetcher values = make_prefetcher<T, D>(rows.v, rows.count, params.v_stride_head, first, last);
  for (int key = 0; key < rows.count; key += 4) {
    values.fetch(4);
    for (int64_t kv_head = first; kv_head < last; ++kv_head) {
      const int64_t at = head + (kv_head - first) * group;
      score_group<T, D>(scratch.q + at * kPaddedDim<D>, rows.k, kv_head * params.k_stride_head,
                        group, scratch.scores + at, key);
    }
  }
  for (int64_t h = head; h < head + num_heads; ++h) {
    if (params.softcap > 0.0f) cap_scores(scratch.scores[h], rows.count, params.softcap);
    scratch.factors[h] = softmax_tile(scratch.scores[h], rows.count, scratch.softmax[h]);
  }
  Prefetcher keys = make_prefetcher<T, D>(next.k, next.count, params.k_stride_head, first, last);
  // Every pass over the values calls for keys kTileKeys / kKeysPerFetch times.
  const int64_t passes = num_heads * kPairs<D> / kMaxBlockHeads;
  const int fetch_rows = static_cast<int>(1 + kKeysPerFetch / max_of(1, passes));
  for (int64_t kv_head = first; kv_head < last; ++kv_head) {
    weigh_group<T, D>(scratch, head + (kv_head - first) * group, group, rows,
                      kv_head * params.v_stride_head, keys, fetch_rows);
  }
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
    for (int i = 0; i < 2 * kPairs<D>; ++i) {
      vstore(scratch.q + h * kPaddedDim<D> + i * VecF::kLanes,
             load_row<D>(query, i / 2, i % 2) * scale);
    }
    for (int d = 0; d < kPaddedDim<D>; d += VecF::kLanes) {
      vstore(scratch.acc + h * kPaddedDim<D> + d, vzero());
    }
    scratch.softmax[h] = RowSoftmax{};
  }

  const int64_t heads_at_once =
      max_of(1, kMaxTileBytes / (kTileKeys * D * static_cast<int64_t>(sizeof(T))));
  KeyWalk<T> walk{params, request, mask_row(params, request, row), range.first, range.last};
  KeyRows<T> tiles[2];
  int current = 0;
  walk.next(tiles[0]);
  while (tiles[current].count > 0) {
    const KeyRows<T>& rows = tiles[current];
    current ^= 1;
    walk.next(tiles[current]);
    for (int64_t first = kv_first; first < kv_last; first += heads_at_once) {
      attend_tile<T, D>(params, rows, tiles[current], first, min_of(first + heads_at_once, kv_last),
                        (first - kv_first) * group, scratch);
    }
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    restore_order<D, T>(scratch.acc + head * kPaddedDim<D>);
  }
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
