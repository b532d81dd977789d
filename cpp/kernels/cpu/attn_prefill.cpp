// Prefill attention, split over queries. A task is one (request, KV head, run of query tokens): the
// query heads of the group and the tokens form the rows of a tile, which meets one tile of keys
// after the other. K and V of a tile are brought to fp32 scratch once and serve all rows.
//
// Key tiles start at multiples of kTileKeys, so that a row's result depends on what it sees only,
// not on the rows that share its task: prompts cut into chunks give the bits of the whole.
//
// Source: tiling with online softmax as in FlashAttention-2, Dao 2023, arXiv:2307.08691.
#include "common/thread_pool.h"
#include "kernels/attention/attn_dispatch.h"
#include "kernels/cpu/attn_common.h"
#include "kernels/cpu/attn_split.h"
#include "kernels/cpu/attn_tile.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {
namespace {

// Rows that a task aims at; a multiple of kTileRows. Q, O and the scores of 60 rows and one tile of
// K and V fit the second-level cache up to D = 256.
constexpr int kTaskRows = 60;

static_assert(kTileKeys == 64, "the keys of a tile are the bits of a uint64_t");

// One task's place in the batch.
struct Tile {
  int64_t kv_head;
  int64_t first_token;
  int num_tokens;
  int group;  // rows of a token: query heads of the KV head
  int rows;   // num_tokens * group
  int rows_padded;
};

struct TileScratch {
  float* q;             // [rows, D], scaled
  float* o;             // [rows, D], numerators
  float* scores;        // [rows, kTileKeys]; then weights
  float* k_transposed;  // [D, kTileKeys]
  float* v;             // [kTileKeys, D]
  float* factors;       // [rows]
  RowSoftmax* softmax;  // [rows]
  uint64_t* seen;       // [tokens]: keys of the tile that a token sees
};

template <int D>
TileScratch carve_tile_scratch(int rows) {
  const int64_t r = rows;
  const int64_t floats = r * (2 * D + kTileKeys + 1) + 2 * D * kTileKeys;
  const int64_t bytes = floats * static_cast<int64_t>(sizeof(float)) +
                        r * static_cast<int64_t>(sizeof(RowSoftmax) + sizeof(uint64_t)) + 64;
  float* at = static_cast<float*>(thread_scratch(static_cast<size_t>(bytes)));
  TileScratch scratch;
  scratch.q = at;
  scratch.o = scratch.q + r * D;
  scratch.scores = scratch.o + r * D;
  scratch.k_transposed = scratch.scores + r * kTileKeys;
  scratch.v = scratch.k_transposed + D * kTileKeys;
  scratch.seen = reinterpret_cast<uint64_t*>(scratch.v + D * kTileKeys);
  scratch.softmax = reinterpret_cast<RowSoftmax*>(scratch.seen + r);
  scratch.factors = reinterpret_cast<float*>(scratch.softmax + r);
  return scratch;
}

template <class T, int D>
void load_queries(const AttentionParams& params, const Request& request, const Tile& tile,
                  const TileScratch& scratch) {
  const VecF scale = vset1(params.scale);
  for (int r = 0; r < tile.rows_padded; ++r) {
    float* q = scratch.q + r * D;
    float* o = scratch.o + r * D;
    const T* stored = r < tile.rows ? q_row<T>(params, request, tile.first_token + r / tile.group,
                                               tile.kv_head * tile.group + r % tile.group)
                                    : nullptr;
    for (int d = 0; d < D; d += VecF::kLanes) {
      vstore(q + d, stored == nullptr ? vzero() : vload(stored + d) * scale);
      vstore(o + d, vzero());
    }
    scratch.softmax[r] = RowSoftmax{};
    scratch.factors[r] = 1.0f;
  }
}

// The keys that any token of the tile may see.
KeyRange tile_keys(const AttentionParams& params, const Request& request, const Tile& tile) {
  KeyRange range{request.kv_len, 0};
  for (int t = 0; t < tile.num_tokens; ++t) {
    const KeyRange one = visible_keys(params, request, tile.first_token + t);
    if (one.first == one.last) continue;
    range.first = min_of(range.first, one.first);
    range.last = max_of(range.last, one.last);
  }
  return range;
}

// Bits first .. last - 1, as far as a word has them.
uint64_t bit_range(int64_t first, int64_t last) {
  first = max_of(first, 0);
  last = min_of(last, 64);
  if (first >= last) return 0;
  return ~uint64_t{0} >> (64 - (last - first)) << first;
}

// Which of `count` keys from `key` on each token of the tile sees.
struct Seen {
  uint64_t any;
  uint64_t all;
};
Seen find_seen(const AttentionParams& params, const Request& request, const Tile& tile, int64_t key,
               int count, uint64_t* seen) {
  Seen result{0, ~uint64_t{0}};
  for (int t = 0; t < tile.num_tokens; ++t) {
    const int64_t row = tile.first_token + t;
    const KeyRange range = visible_keys(params, request, row);
    uint64_t bits = bit_range(range.first - key, min_of(range.last - key, count));
    if (const uint8_t* mask = mask_row(params, request, row); mask != nullptr && bits != 0) {
      for (int i = 0; i < count; ++i) {
        if ((bits >> i & 1) != 0 && mask[(key + i) * params.mask_stride_kv] == 0) {
          bits &= ~(uint64_t{1} << i);
        }
      }
    }
    seen[t] = bits;
    result.any |= bits;
    result.all &= bits;
  }
  return result;
}

void weigh_scores(const AttentionParams& params, const Tile& tile, int count,
                  const TileScratch& scratch) {
  const uint64_t every = bit_range(0, count);
  for (int r = 0; r < tile.rows; ++r) {
    float* scores = scratch.scores + r * kTileKeys;
    if (params.softcap > 0.0f) cap_scores(scores, count, params.softcap);
    for (uint64_t hidden = every & ~scratch.seen[r / tile.group]; hidden != 0;
         hidden &= hidden - 1) {
      scores[__builtin_ctzll(hidden)] = kNegInf;
    }
    scratch.factors[r] = softmax_tile(scores, count, scratch.softmax[r]);
  }
}

// O = factor * O + weights x V where some rows must not touch some values at all, because 0 times a
// value that is not finite is NaN. Adds in the order of multiply(), so that the bits are the same.
template <int D>
void add_seen_values(const Tile& tile, const TileScratch& scratch) {
  for (int r = 0; r < tile.rows; ++r) {
    float* o = scratch.o + r * D;
    const float* weights = scratch.scores + r * kTileKeys;
    const VecF factor = vset1(scratch.factors[r]);
    for (int d = 0; d < D; d += VecF::kLanes) vstore(o + d, vload(o + d) * factor);
    for (uint64_t keys = scratch.seen[r / tile.group]; keys != 0; keys &= keys - 1) {
      const int key = __builtin_ctzll(keys);
      const VecF weight = vset1(weights[key]);
      const float* v = scratch.v + key * D;
      for (int d = 0; d < D; d += VecF::kLanes) {
        vstore(o + d, vfma(weight, vload(v + d), vload(o + d)));
      }
    }
  }
}

template <class T, int D>
void run_tile(const AttentionParams& params, const Request& request, const Tile& tile) {
  const TileScratch scratch = carve_tile_scratch<D>(tile.rows_padded);
  load_queries<T, D>(params, request, tile, scratch);
  const KeyRange range = tile_keys(params, request, tile);
  KeyRows<T> rows;
  for (int64_t key = range.first / kTileKeys * kTileKeys; key < range.last; key += kTileKeys) {
    KeyWalk<T> walk{params, request, nullptr, key, min_of(key + kTileKeys, range.last)};
    walk.next(rows);
    const Seen seen = find_seen(params, request, tile, key, rows.count, scratch.seen);
    if (seen.any == 0) continue;
    load_keys<T, D>(rows, tile.kv_head * params.k_stride_head, scratch.k_transposed);
    multiply<kTileKeys, D, kTileKeys, kTileKeys>(scratch.q, scratch.k_transposed, tile.rows_padded,
                                                 D, nullptr, scratch.scores);
    weigh_scores(params, tile, rows.count, scratch);
    const uint64_t not_finite =
        load_values<T, D>(rows, tile.kv_head * params.v_stride_head, seen.any, scratch.v);
    if ((not_finite & ~seen.all) != 0) {
      add_seen_values<D>(tile, scratch);
    } else {
      multiply<D, kTileKeys, D, D>(scratch.scores, scratch.v, tile.rows_padded, rows.count,
                                   scratch.factors, scratch.o);
    }
  }
  for (int r = 0; r < tile.rows; ++r) {
    finish_row<T, D>(params, request, tile.first_token + r / tile.group,
                     tile.kv_head * tile.group + r % tile.group, scratch.o + r * D,
                     scratch.softmax[r]);
  }
}

template <class T, int D>
void prefill(const AttentionParams& params) {
  const auto group = static_cast<int>(params.num_q_heads / params.num_kv_heads);
  const int tile_tokens = group < kTaskRows ? kTaskRows / group : 1;
  const auto num_tiles = [&](int64_t index) {
    return ceil_div(load_request(params, index).q_len, tile_tokens);
  };
  int64_t total = 0;
  for (int64_t index = 0; index < params.num_requests; ++index) total += num_tiles(index);

  // Later queries see more keys, so the last tile comes first: the longest tasks are not left over.
  parallel_for(total * params.num_kv_heads, [&](int64_t task) {
    int64_t tile_index = total - 1 - task / params.num_kv_heads;
    int64_t index = 0;
    for (int64_t tiles = num_tiles(0); tile_index >= tiles; tiles = num_tiles(index)) {
      tile_index -= tiles;
      ++index;
    }
    const Request request = load_request(params, index);
    const int64_t kv_head = task % params.num_kv_heads;
    const int64_t first_token = tile_index * tile_tokens;
    const auto num_tokens = static_cast<int>(min_of(tile_tokens, request.q_len - first_token));
    if (request.q_len == 1 || params.match_decode) {
      for (int64_t row = first_token; row < first_token + num_tokens; ++row) {
        decode_single_row(params, request, row, kv_head);
      }
      return;
    }
    const int rows = num_tokens * group;
    run_tile<T, D>(params, request,
                   {.kv_head = kv_head,
                    .first_token = first_token,
                    .num_tokens = num_tokens,
                    .group = group,
                    .rows = rows,
                    .rows_padded = round_up(rows, kTileRows)});
  });
}

}  // namespace

void attn_prefill(const AttentionParams& params) {
  dispatch_float_dtype(params.dtype, [&]<class T>() {
    dispatch_head_dim(params.head_dim, [&]<int D>() { prefill<T, D>(params); });
  });
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
