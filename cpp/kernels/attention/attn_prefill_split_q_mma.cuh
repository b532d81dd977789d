// Split-Q prefill on tensor cores, for 16-bit elements (compute capability 8.0 and later).
//
// One block serves a tile of query rows (attn_prefill_tiles.cuh), each warp 16 or 32 of them for
// all keys. Keys and values pass through kStages slots of shared memory, kStages - 1 tile loads
// under way (cp.async) while one tile is computed, with one barrier a tile. Each warp loads its
// share of a tile's keys and resolves their addresses once, one lane a row; page ids are read a
// tile ahead. Scores, weights and results stay in registers.
//
// Tiles that no row of the block sees are skipped, tiles that none of a warp's rows sees by that
// warp, and rows are looked at one by one only in tiles that a warp sees in part. Key tiles start
// at multiples of kTileKeys and a row's softmax looks at that row alone, so that its bits do not
// depend on the tile that it is in. They do depend on whether its keys are split over two groups.
//
// Keys outside what the block sees are zero-filled without reading them. Inside it a row may be
// kept from a value that another row sees, and its weight of zero times NaN or infinity would be
// NaN. Nothing is spent on that until a result is not finite; the block then starts again and takes
// such values out of the matrix products.
//
// Preconditions: rows of k and v start at multiples of 16 bytes.
// Source: tiling with online softmax as in FlashAttention-2, Dao 2023, arXiv:2307.08691.
#pragma once

#include "kernels/attention/attn_prefill_mma_io.cuh"
#include "kernels/attention/attn_prefill_tiles.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/online_softmax.cuh"
#include "kernels/common/vec.cuh"
#include "kernels/common/warp.cuh"

namespace astrai::kernels {

// Exponents of two that a logit may exceed the row's reference by before everything summed so far
// is rescaled to a new one. Weights stay below 2^8, which every element type holds.
constexpr float kLazyRescale = 8.0f;

// One warp's rows. kGeneral: with a mask, or scores that one multiplication does not turn into
// exponents (softcap, a scale that is not positive).
template <class T, int D, PrefillShape kShape, bool kGeneral>
class PrefillMmaWarp {
  using Shape = PrefillMmaShape<D, kShape>;
  static constexpr int kMTiles = Shape::kMTiles;
  static constexpr int kTileKeys = Shape::kTileKeys;
  static constexpr int kKeyTiles = kTileKeys / 8;  // n8 tiles of the scores
  static constexpr int kChunks = Shape::kChunks;
  static constexpr int kRowBytes = Shape::kRowBytes;
  static constexpr int kFragments = Shape::kFragments;
  static constexpr int kOwnTiles = D / 8 / Shape::kKeyGroups;  // n8 tiles that a group finishes
  static constexpr int kMergeRow = kWarpSize * 16;
  using Scores = float[kMTiles][kKeyTiles][4];

 public:
  static constexpr int kMergeBytes = (kOwnTiles + 1) * kMergeRow;

  __device__ PrefillMmaWarp(const PrefillKernelParams& params, const PrefillBlock<D, kShape>& block,
                            uint32_t q_shared)
      : params_(params),
        block_(block),
        q_shared_(q_shared),
        lane_(static_cast<int>(threadIdx.x % kWarpSize)),
        warp_(static_cast<int>(threadIdx.x / kWarpSize) % Shape::kGroupWarps),
        all_(block.rows_keys(params, warp_ * Shape::kWarpRows, Shape::kWarpRows).all) {}

  // Takes the queries, which this warp has brought to its rows of shared memory, to registers.
  __device__ void take_q() {
    if constexpr (!Shape::kSharedQ) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int step = 0; step < D / 16; ++step) load_q(m, step, q_[step][m]);
      }
    }
  }

  __device__ void reset() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference_[m][half] = -INFINITY;
        sum_[m][half] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] = 0.0f;
      }
    }
  }

  // Takes in a tile of keys and values. `meanwhile` is called while the matrix units are busy.
  template <class Fn>
  __device__ void add_tile(uint32_t k_tile, uint32_t v_tile, int first_key, Fn&& meanwhile) {
    const bool all = first_key >= all_.begin && first_key + kTileKeys <= all_.end;
    if (!all) [[unlikely]] {
      const KeyRange any =
          block_.rows_keys(params_, warp_ * Shape::kWarpRows, Shape::kWarpRows).any;
      if (first_key >= any.end || first_key + kTileKeys <= any.begin) {
        meanwhile();
        return;
      }
    }
    Scores scores;
    score(k_tile, scores);
    meanwhile();
    if constexpr (kGeneral) {
      for_each_score(scores, [&](float& s) { s = logit(params_.attn, s); });
    }
    if (!all) [[unlikely]]
      hide(first_key, scores);
    update_softmax(scores);
    add_values(v_tile, scores);
  }

  // Adds the values of a stage that are not finite to the rows that see them, outside of the matrix
  // products. What is left of the stage must then be cleared of them.
  __device__ void add_wild_values(uint32_t values, int first_key) {
    for (int k = 0; k < Shape::kStageKeys; ++k) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        const uint32_t pair = load_shared_u32(values + k * kRowBytes +
                                              swizzled_chunk<kChunks>(k, n) * 16 + (lane_ % 4) * 4);
        const uint32_t wild[2] = {is_wild<T>(pair) ? pair & 0xffffu : 0,
                                  is_wild<T>(pair >> 16) ? pair >> 16 : 0};
        if ((wild[0] | wild[1]) == 0) continue;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (wild[i % 2] == 0 || !sees(local_row(m, i / 2), first_key + k)) continue;
            out_[m][n][i] += from_bits<T>(wild[i % 2]);
          }
        }
      }
    }
  }

  // True when some result is NaN or infinite.
  __device__ bool not_finite() const {
    float probe = 0.0f;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) probe = fmaf(out_[m][n][i], 0.0f, probe);
      }
    }
    return probe != 0.0f;
  }

  // Two groups: hands the other group's warp of the same rows what this one found for the columns
  // that the other one finishes. kMergeBytes of `shared` for each warp of the block.
  template <int kGroup>
  __device__ void give(uint32_t shared) const {
    const uint32_t mine = merge_address(shared, kGroup);
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) {
      store_four(mine + n * kMergeRow, out_[0][(1 - kGroup) * kOwnTiles + n]);
    }
    const float totals[4] = {reference_[0][0], reference_[0][1], sum_[0][0], sum_[0][1]};
    store_four(mine + kOwnTiles * kMergeRow, totals);
  }

  // Takes in what the other one gave. Both add the same numbers in the same way.
  template <int kGroup>
  __device__ void take(uint32_t shared) {
    const uint32_t other = merge_address(shared, 1 - kGroup);
    float totals[4];
    load_four(other + kOwnTiles * kMergeRow, totals);
    float own_factor[2], other_factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = fmaxf(reference_[0][half], totals[half]);
      const float shift = finite_reference(reference);
      own_factor[half] = exp2_approx(reference_[0][half] - shift);
      other_factor[half] = exp2_approx(totals[half] - shift);
      reference_[0][half] = reference;
      sum_[0][half] = __fadd_rn(__fmul_rn(sum_[0][half], own_factor[half]),
                                __fmul_rn(totals[2 + half], other_factor[half]));
    }
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n) {
      float theirs[4];
      load_four(other + n * kMergeRow, theirs);
      float(&own)[4] = out_[0][kGroup * kOwnTiles + n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[i] = __fadd_rn(__fmul_rn(own[i], own_factor[i / 2]),
                           __fmul_rn(theirs[i], other_factor[i / 2]));
      }
    }
  }

  // Leaves the columns of the warp's rows that kGroup finishes, as T, at its rows of `shared`, and
  // writes their LSE.
  template <int kGroup>
  __device__ void finish(uint32_t shared) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = local_row(m, half);
        const float sum = group_sum<4>(sum_[m][half]);
        float factor = 0.0f;
        if (row < block_.tile.num_rows) {
          const PrefillRow place = block_.tile.place_row(params_, row);
          const float max = reference_[m][half] * kLn2;
          const SoftmaxTotal total(max, sum, sink_of(params_, place.head));
          if (sum != 0.0f) factor = total.share(max, sum) / sum;
          if (kGroup == 0 && lane_ % 4 == 0 && params_.attn.lse != nullptr) {
            params_.attn.lse[block_.tile.lse_offset(params_, place)] = total.lse;
          }
        }
#pragma unroll
        for (int n = kGroup * kOwnTiles; n < (kGroup + 1) * kOwnTiles; ++n) {
          const uint32_t at =
              shared + row * kRowBytes + swizzled_chunk<kChunks>(row, n) * 16 + (lane_ % 4) * 4;
          store_shared_u32(
              at, pack2<T>(out_[m][n][half * 2] * factor, out_[m][n][half * 2 + 1] * factor));
        }
      }
    }
  }

 private:
  __device__ uint32_t merge_address(uint32_t shared, int group) const {
    return shared + (group * Shape::kGroupWarps + warp_) * kMergeBytes + lane_ * 16;
  }
  __device__ static void store_four(uint32_t address, const float (&values)[4]) {
    store_shared_u128(address, {__float_as_uint(values[0]), __float_as_uint(values[1]),
                                __float_as_uint(values[2]), __float_as_uint(values[3])});
  }
  __device__ static void load_four(uint32_t address, float (&values)[4]) {
    const uint4 bits = load_shared_u128(address);
    values[0] = __uint_as_float(bits.x);
    values[1] = __uint_as_float(bits.y);
    values[2] = __uint_as_float(bits.z);
    values[3] = __uint_as_float(bits.w);
  }

  // From a score to an exponent of two.
  __device__ float scale_log2() const { return kGeneral ? kLog2e : params_.scale_log2; }

  // Row of the block's tile that element pair `half` of this lane belongs to.
  __device__ int local_row(int m, int half) const {
    return warp_ * Shape::kWarpRows + m * 16 + half * 8 + lane_ / 4;
  }

  __device__ bool sees(int row, int key) const {
    if (key < block_.row_keys[row].begin || key >= block_.row_keys[row].end) return false;
    if constexpr (!kGeneral) return true;
    const uint8_t* mask = block_.tile.mask_row(params_, block_.tile.place_row(params_, row).token);
    return mask == nullptr || mask[key * params_.attn.mask_stride_kv] != 0;
  }

  template <class Fn>
  __device__ void for_each_score(Scores& scores, Fn&& fn) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) fn(scores[m][n][i]);
      }
    }
  }

  // Address of this lane's matrix row for the first of D / 16 steps along the rows; what follows is
  // advance_chunks and multiples of eight rows away.
  __device__ static uint32_t matrix_address(uint32_t tile, int row, int chunk) {
    return tile + row * kRowBytes + swizzled_chunk<kChunks>(row, chunk) * 16;
  }

  __device__ void load_q_step(int step) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) load_q(m, step, q_[step % Shape::kQSteps][m]);
  }

  __device__ void load_q(int m, int step, uint32_t (&fragment)[4]) const {
    const uint32_t first =
        matrix_address(q_shared_, warp_ * Shape::kWarpRows + (lane_ & 15), lane_ >> 4);
    ldmatrix_x4(fragment, advance_chunks<kChunks>(first, step * 2) + m * 16 * kRowBytes);
  }

  // Raw products of the warp's rows with a tile of keys. Fragments are loaded kFragments - 1 groups
  // of matrix instructions ahead of their use.
  __device__ void score(uint32_t k_tile, Scores& scores) {
    constexpr int kSteps = D / 16;
    constexpr int kPairs = kKeyTiles / 2;
    constexpr int kLoads = kSteps * kPairs;
    for_each_score(scores, [](float& s) { s = 0.0f; });
    const uint32_t first = matrix_address(k_tile, (lane_ & 7) + (lane_ >> 4) * 8, (lane_ >> 3) & 1);
    const auto load_keys = [&](int index, uint32_t(&fragment)[4]) {
      ldmatrix_x4(fragment, advance_chunks<kChunks>(first, index / kPairs * 2) +
                                index % kPairs * (16 * kRowBytes));
    };
    uint32_t keys[kFragments][4];
#pragma unroll
    for (int i = 0; i < kFragments - 1; ++i) load_keys(i, keys[i]);
    if constexpr (Shape::kSharedQ) load_q_step(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int index = step * kPairs + pair;
        const int next = index + kFragments - 1;
        if (next < kLoads) load_keys(next, keys[next % kFragments]);
        if constexpr (Shape::kSharedQ) {
          if (pair == 0 && step + 1 < kSteps) load_q_step(step + 1);
        }
        const uint32_t(&b)[4] = keys[index % kFragments];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          const uint32_t(&q)[4] = q_[step % Shape::kQSteps][m];
          mma_m16n8k16<T>(scores[m][pair * 2], q, b[0], b[1]);
          mma_m16n8k16<T>(scores[m][pair * 2 + 1], q, b[2], b[3]);
        }
      }
    }
  }

  // Bit n * 2 + i: whether the mask keeps this lane's key i of the n-th eight from first_key on, of
  // those in `keys`.
  __device__ unsigned mask_bits(int row, KeyRange keys, int first_key) const {
    const uint8_t* mask = block_.tile.mask_row(params_, block_.tile.place_row(params_, row).token);
    if (mask == nullptr) return kFullWarp;
    unsigned bits = 0;
#pragma unroll 1
    for (int bit = 0; bit < kKeyTiles * 2; ++bit) {
      const int key = first_key + bit / 2 * 8 + (lane_ % 4) * 2 + bit % 2;
      if (key < keys.begin || key >= keys.end) continue;
      if (mask[key * params_.attn.mask_stride_kv] != 0) bits |= 1u << bit;
    }
    return bits;
  }

  // -inf where a row does not see a key.
  __device__ void hide(int first_key, Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = local_row(m, half);
        const KeyRange keys = block_.row_keys[row];
        const unsigned kept = kGeneral ? mask_bits(row, keys, first_key) : 0;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first_key + n * 8 + (lane_ % 4) * 2 + i;
            bool visible = key >= keys.begin && key < keys.end;
            if constexpr (kGeneral) visible = visible && ((kept >> (n * 2 + i)) & 1) != 0;
            if (!visible) scores[m][n][half * 2 + i] = -INFINITY;
          }
        }
      }
    }
  }

  // Turns scores into weights against the row's reference. A reference, in exponents of two, is the
  // largest score seen when it was last moved; it is moved only when a score exceeds it by much.
  __device__ void update_softmax(Scores& scores) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          highest = fmaxf(highest, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
        }
        highest = group_max<4>(highest) * scale_log2();
        const float before = reference_[m][half];
        const bool move = highest > before + kLazyRescale;
        const float reference = move ? highest : before;
        // From -inf nothing has been summed yet.
        factor[half] = move && before != -INFINITY ? exp2_approx(before - highest) : 1.0f;
        reference_[m][half] = reference;
        const float shift = finite_reference(reference);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& weight = scores[m][n][half * 2 + i];
            weight = exp2_approx(fmaf(weight, scale_log2(), -shift));
            sum += weight;
          }
        }
        sum_[m][half] = sum_[m][half] * factor[half] + sum;
      }
      if (__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) out_[m][n][i] *= factor[i / 2];
        }
      }
    }
  }

  __device__ void add_values(uint32_t v_tile, const Scores& scores) {
    constexpr int kSteps = kTileKeys / 16;
    constexpr int kPairs = D / 16;
    constexpr int kLoads = kSteps * kPairs;
    const uint32_t first = matrix_address(v_tile, lane_ & 15, lane_ >> 4);
    const auto load_values = [&](int index, uint32_t(&fragment)[4]) {
      ldmatrix_x4_trans(fragment, advance_chunks<kChunks>(first, index % kPairs * 2) +
                                      index / kPairs * (16 * kRowBytes));
    };
    uint32_t values[kFragments][4];
#pragma unroll
    for (int i = 0; i < kFragments - 1; ++i) load_values(i, values[i]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t weights[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const float(&low)[4] = scores[m][step * 2];
        const float(&high)[4] = scores[m][step * 2 + 1];
        weights[m][0] = pack2<T>(low[0], low[1]);
        weights[m][1] = pack2<T>(low[2], low[3]);
        weights[m][2] = pack2<T>(high[0], high[1]);
        weights[m][3] = pack2<T>(high[2], high[3]);
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int index = step * kPairs + pair;
        const int next = index + kFragments - 1;
        if (next < kLoads) load_values(next, values[next % kFragments]);
        const uint32_t(&b)[4] = values[index % kFragments];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          mma_m16n8k16<T>(out_[m][pair * 2], weights[m], b[0], b[1]);
          mma_m16n8k16<T>(out_[m][pair * 2 + 1], weights[m], b[2], b[3]);
        }
      }
    }
  }

  const PrefillKernelParams& params_;
  const PrefillBlock<D, kShape>& block_;
  const uint32_t q_shared_;
  const int lane_;
  const int warp_;
  const KeyRange all_;  // keys that every row of the warp sees
  uint32_t q_[Shape::kQSteps][kMTiles][4];
  float out_[kMTiles][D / 8][4];
  float reference_[kMTiles][2];
  float sum_[kMTiles][2];  // of this lane's columns only
};

// Waits for the warps of a group.
template <int D, PrefillShape kShape>
__device__ inline void group_barrier(int group) {
  using Shape = PrefillMmaShape<D, kShape>;
  if constexpr (Shape::kKeyGroups == 1) {
    __syncthreads();
  } else {
    // Barrier 0 is that of __syncthreads.
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(Shape::kGroupThreads) : "memory");
  }
}

template <class T, int D, PrefillShape kShape, bool kGeneral>
__global__ void __launch_bounds__(PrefillMmaShape<D, kShape>::kThreads,
                                  PrefillMmaShape<D, kShape>::kBlocksPerSm)
    attn_prefill_split_q_mma_kernel(const __grid_constant__ PrefillKernelParams params) {
  using Shape = PrefillMmaShape<D, kShape>;
  constexpr int kTileKeys = Shape::kTileKeys;
  constexpr int kStageKeys = Shape::kStageKeys;
  constexpr int kStages = Shape::kStages;
  constexpr int kAhead = kStages - 1;  // stages under way
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ PrefillBlock<D, kShape> block;
  allow_next_grid();
  wait_for_previous_grid();
  if (!block.set(params)) return;

  const uint32_t stages = shared_address(shared_memory) + (Shape::kSharedQ ? Shape::kQBytes : 0);
  const int group = static_cast<int>(threadIdx.x) / Shape::kGroupThreads;
  const auto stage = [&](int index) {
    return stages + group * Shape::kGroupBytes + index % kStages * Shape::kStageBytes;
  };
  // Queries on their way to registers pass through the stage that is filled last.
  const uint32_t q_shared = Shape::kSharedQ ? shared_address(shared_memory) : stage(kAhead);
  load_q_rows<T, D, kShape>(params, block, q_shared);
  cp_async_commit();
  const KeyRange keys = block.rows_keys(params, 0, Shape::kRows).any;
  PrefillLoader<D, kShape> loader(params, block, keys);
  PrefillMmaWarp<T, D, kShape, kGeneral> warp(params, block, q_shared);

  // A second time, carefully, when a value that is not finite may have reached rows that do not
  // see it.
  for (bool careful = false;; careful = true) {
    // Both groups go round equally often, the second perhaps once past the last key, where it has
    // nothing to do: the barriers of both then count alike, as race checkers want it.
    const int begin = keys.begin / Shape::kStrideKeys * Shape::kStrideKeys;
    const int num_rounds = (max(keys.end - begin, 0) + Shape::kStrideKeys - 1) / Shape::kStrideKeys;
    int first_key = begin + group * kStageKeys;
    loader.start(first_key, stage);
    if (!careful) {
      cp_async_wait<kAhead>();
      __syncwarp();
      warp.take_q();
    }
    warp.reset();
    for (int index = 0; index < num_rounds; ++index, first_key += Shape::kStrideKeys) {
      cp_async_wait<kStages - 2>();
      group_barrier<D, kShape>(group);  // the stage is here, and the one before it has been used
      loader.copy(stage(index + kAhead));
      const int next_key = first_key + (kAhead + 1) * Shape::kStrideKeys;
      loader.find_page(next_key);
      const uint32_t k_stage = stage(index);
      const uint32_t v_stage = k_stage + Shape::kKeysBytes;
      if (careful) [[unlikely]] {
        warp.add_wild_values(v_stage, first_key);
        group_barrier<D, kShape>(group);
        clear_wild_values<T, D, kShape>(v_stage);
        group_barrier<D, kShape>(group);
      }
      warp.add_tile(k_stage, v_stage, first_key, [&] { loader.find_rows(next_key); });
      if constexpr (Shape::kStageTiles == 2) {
        warp.add_tile(k_stage + Shape::kTileBytes, v_stage + Shape::kTileBytes,
                      first_key + kTileKeys, [] {});
      }
    }
    // Also the barrier before shared memory takes other things.
    const bool again = __syncthreads_or(warp.not_finite()) != 0;
    if (careful || !again) break;
  }
  uint32_t results = Shape::kSharedQ ? q_shared : stages;
  if constexpr (Shape::kKeyGroups == 1) {
    warp.template finish<0>(results);
  } else {
    static_assert(Shape::kWarps * decltype(warp)::kMergeBytes + Shape::kQBytes <=
                  Shape::kSharedBytes);
    results += Shape::kWarps * decltype(warp)::kMergeBytes;
    group == 0 ? warp.template give<0>(stages) : warp.template give<1>(stages);
    __syncthreads();
    if (group == 0) {
      warp.template take<0>(stages);
      warp.template finish<0>(results);
    } else {
      warp.template take<1>(stages);
      warp.template finish<1>(results);
    }
  }
  // What this warp stores is what it has just written.
  __syncwarp();
  store_rows<T, D, kShape>(params, block, results);
}

}  // namespace astrai::kernels
