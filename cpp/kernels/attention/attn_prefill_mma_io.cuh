// Shapes of the tensor-core prefill kernel, and its way between global and shared memory.
#pragma once

#include "kernels/attention/attn_prefill_tiles.cuh"
#include "kernels/common/cp_async.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/vec.cuh"
#include "kernels/common/warp.cuh"

namespace astrai::kernels {

// Largest head dim whose results fit a warp's registers for 32 rows.
constexpr int kMaxWidePrefillHeadDim = 128;

// The wide shape reads each fragment of a key or value once for 32 rows, half the shared memory
// traffic for a matrix instruction, which is what limits 16 rows on large devices. The narrow one
// has half the rows, for batches with few of them. The split one is narrow with twice the warps:
// two groups share the rows, each has every other stage's keys in a pipeline of its own, and what
// they found is merged at the end. A row is served in half the time, which is all that counts where
// there are hardly more blocks than multiprocessors.
enum class PrefillShape : uint8_t { kNarrow, kSplit, kWide };

template <int D, PrefillShape kShape>
struct PrefillMmaShape {
  static constexpr bool kWide = kShape == PrefillShape::kWide;
  static_assert(!kWide || D <= kMaxWidePrefillHeadDim);
  static constexpr int kKeyGroups = kShape == PrefillShape::kSplit ? 2 : 1;
  static constexpr int kGroupWarps = 4;
  static constexpr int kGroupThreads = kGroupWarps * kWarpSize;
  static constexpr int kWarps = kKeyGroups * kGroupWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMTiles = kWide ? 2 : 1;  // m16 tiles of a warp
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kRows = kGroupWarps * kWarpRows;
  static constexpr int kTileKeys = D > 128 ? 32 : 64;  // the same in every shape: see the kernel
  // Tiles that are loaded together: where rows are short, what comes once a load would weigh.
  static constexpr int kStageTiles = kWide && D <= 64 ? 2 : 1;
  static constexpr int kStageKeys = kStageTiles * kTileKeys;
  static constexpr int kStrideKeys = kKeyGroups * kStageKeys;  // from a group's stage to its next
  static constexpr int kStages = kWide || D <= 64 ? 2 : 3;
  static constexpr bool kSharedQ = kWide && D > 64;      // else in registers
  static constexpr int kQSteps = kSharedQ ? 2 : D / 16;  // steps whose fragments registers hold
  // Fragments of keys or values in registers: one in use, the others on their way.
  static constexpr int kFragments = kWide ? 2 : (kKeyGroups == 2 && D <= 64) ? 2 : 4;
  static constexpr int kBlocksPerSm = kKeyGroups == 2          ? (D <= 64 ? 2 : 1)
                                      : D <= (kWide ? 32 : 64) ? 3
                                                               : 2;
  static constexpr int kChunks = D / 8;  // 16-byte chunks of a row
  static constexpr int kRowBytes = D * 2;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;
  static constexpr int kKeysBytes = kStageKeys * kRowBytes;  // of a stage; as many values follow
  static constexpr int kStageBytes = 2 * kKeysBytes;
  static constexpr int kQBytes = kRows * kRowBytes;
  static constexpr int kGroupBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kKeyGroups * kGroupBytes + (kSharedQ ? kQBytes : 0);
  static constexpr int kLoadRows = kStageKeys / kGroupWarps;  // rows of keys that a warp loads
  static_assert(kSharedQ || kQBytes <= kStageBytes, "queries pass through a stage");
  static_assert((kLoadRows * kChunks) % kWarpSize == 0);
  static_assert(kLoadRows == kWarpSize || 2 * kLoadRows <= kWarpSize, "a lane finds a row or two");
};

// ---- 16-bit elements as bits --------------------

__device__ inline uint32_t load_shared_u32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ inline void store_shared_u32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ inline void store_shared_u128(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ inline uint4 load_shared_u128(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

template <class T>
__device__ inline float from_bits(uint32_t bits) {
  const uint16_t low = static_cast<uint16_t>(bits);
  return to_float(*reinterpret_cast<const T*>(&low));
}

// Whether the element in the low half is NaN or infinite.
template <class T>
__device__ inline bool is_wild(uint32_t bits);
template <>
__device__ inline bool is_wild<__nv_bfloat16>(uint32_t bits) {
  return (bits & 0x7f80u) == 0x7f80u;
}
template <>
__device__ inline bool is_wild<__half>(uint32_t bits) {
  return (bits & 0x7c00u) == 0x7c00u;
}

// Zeros in place of the values of a stage that are not finite. All threads of the group call it.
template <class T, int D, PrefillShape kShape>
__device__ void clear_wild_values(uint32_t values) {
  using Shape = PrefillMmaShape<D, kShape>;
  for (int at = static_cast<int>(threadIdx.x) % Shape::kGroupThreads * 4; at < Shape::kKeysBytes;
       at += Shape::kGroupThreads * 4) {
    const uint32_t pair = load_shared_u32(values + at);
    const uint32_t low = is_wild<T>(pair) ? 0 : pair & 0xffffu;
    const uint32_t high = is_wild<T>(pair >> 16) ? 0 : pair & 0xffff0000u;
    if ((low | high) != pair) store_shared_u32(values + at, low | high);
  }
}

// ---- what a block knows of its work --------------------

// In shared memory, to leave the registers to the loop.
template <int D, PrefillShape kShape>
struct PrefillBlock {
  using Shape = PrefillMmaShape<D, kShape>;
  PrefillTile tile;
  const unsigned char* base[2];     // of the request's and head's keys and values
  const int32_t* pages;             // of the request; null when dense
  KeyRange row_keys[Shape::kRows];  // empty past the tile's rows
  // A warp's own: offsets of its rows in q, addresses of the rows that it loads, offsets in out.
  int64_t places[Shape::kWarps][Shape::kLoadRows <= 16 ? 32 : 64];

  // Returns false when the block has nothing to do. All threads call it.
  __device__ bool set(const PrefillKernelParams& params) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kWarpSize) {
      const PrefillTile found(params, Shape::kRows);
      if (thread == 0) {
        tile = found;
        if (found.num_rows > 0) set_source(params.attn, found);
      }
    }
    __syncthreads();
    if (tile.num_rows == 0) return false;
    for (int row = thread; row < Shape::kRows; row += Shape::kThreads) {
      row_keys[row] = KeyRange{0, 0};
      if (row < tile.num_rows) {
        row_keys[row] = tile.visible_keys(params, tile.place_row(params, row).token);
      }
    }
    __syncthreads();
    return true;
  }

  // What rows [first, first + count) see, as far as the tile has them.
  __device__ RowsKeys rows_keys(const PrefillKernelParams& params, int first, int count) const {
    const int last = max(first, min(first + count, tile.num_rows) - 1);
    return RowsKeys(params, tile, row_keys[first], row_keys[last]);
  }

 private:
  __device__ void set_source(const AttentionParams& attn, const PrefillTile& found) {
    base[0] = static_cast<const unsigned char*>(attn.k) + found.kv_head * attn.k_stride_head * 2;
    base[1] = static_cast<const unsigned char*>(attn.v) + found.kv_head * attn.v_stride_head * 2;
    pages = nullptr;
    if (attn.page_size > 0) {
      pages = attn.kv_indices + attn.kv_indptr[found.request];
    } else {
      base[0] += found.request * attn.k_stride_batch * 2;
      base[1] += found.request * attn.v_stride_batch * 2;
    }
  }
};

// ---- queries and results --------------------

constexpr int64_t kNoPlace = INT64_MIN;

// Calls fn(offset, column, address) for this lane's share of kCount 16-byte chunks of each of its
// warp's rows, from first_chunk on.
// `offset` is where the row lies in a tensor, which offset_of(row) tells, or kNoPlace where the
// tile lacks it; `address` is the chunk's in shared memory.
template <int kCount, int D, PrefillShape kShape, class OffsetFn, class Fn>
__device__ inline void for_each_row_chunk(PrefillBlock<D, kShape>& block, uint32_t shared,
                                          int first_chunk, OffsetFn&& offset_of, Fn&& fn) {
  using Shape = PrefillMmaShape<D, kShape>;
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned warp = threadIdx.x / kWarpSize;
  const unsigned warp_row = warp % Shape::kGroupWarps * Shape::kWarpRows;
  int64_t* const places = block.places[warp];
  if (lane < Shape::kWarpRows) {
    const int row = static_cast<int>(warp_row + lane);
    places[lane] = row < block.tile.num_rows ? offset_of(row) : kNoPlace;
  }
  __syncwarp();
#pragma unroll 4
  for (unsigned index = lane; index < Shape::kWarpRows * kCount; index += kWarpSize) {
    const unsigned row = index / kCount;
    const int chunk = first_chunk + static_cast<int>(index % kCount);
    const int swizzled = swizzled_chunk<Shape::kChunks>(static_cast<int>(row), chunk);
    fn(places[row], chunk * 8, shared + (warp_row + row) * Shape::kRowBytes + swizzled * 16);
  }
  __syncwarp();
}

// Starts the way of the warp's query rows to shared memory; rows that the tile lacks are zeros.
template <class T, int D, PrefillShape kShape>
__device__ void load_q_rows(const PrefillKernelParams& params, PrefillBlock<D, kShape>& block,
                            uint32_t shared) {
  const T* q = static_cast<const T*>(params.attn.q);
  const auto offset_of = [&](int row) {
    return block.tile.q_offset(params, block.tile.place_row(params, row));
  };
  const auto load = [&](int64_t offset, int column, uint32_t address) {
    const bool there = offset != kNoPlace;
    const T* source = q + (there ? offset + column : 0);
    if (params.q_vectors) {
      cp_async_16(address, source, there);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Vec<T, 2> two{};
        if (there) two = {source[i * 2], source[i * 2 + 1]};
        store_shared_u32(address + i * 4, *reinterpret_cast<const uint32_t*>(&two));
      }
    }
  };
  for_each_row_chunk<D / 8>(block, shared, 0, offset_of, load);
}

// Results of the warp's rows from shared memory to `out`: the columns that the warp's group
// finishes.
template <class T, int D, PrefillShape kShape>
__device__ void store_rows(const PrefillKernelParams& params, PrefillBlock<D, kShape>& block,
                           uint32_t shared) {
  T* out = static_cast<T*>(params.attn.out);
  const auto offset_of = [&](int row) {
    return block.tile.out_offset(params, block.tile.place_row(params, row));
  };
  const auto store = [&](int64_t offset, int column, uint32_t address) {
    if (offset == kNoPlace) return;
    const uint4 eight = load_shared_u128(address);
    T* target = out + offset + column;
    if (params.out_vectors) {
      *reinterpret_cast<uint4*>(target) = eight;
    } else {
      const T* elements = reinterpret_cast<const T*>(&eight);
#pragma unroll
      for (int i = 0; i < 8; ++i) target[i] = elements[i];
    }
  };
  using Shape = PrefillMmaShape<D, kShape>;
  constexpr int kChunks = Shape::kChunks / Shape::kKeyGroups;
  const int group = static_cast<int>(threadIdx.x) / Shape::kGroupThreads;
  for_each_row_chunk<kChunks>(block, shared, group * kChunks, offset_of, store);
}

// ---- keys and values --------------------

// Brings stages of keys and values to shared memory. A warp loads kLoadRows rows of each and finds
// their addresses, keys first, one lane a row.
template <int D, PrefillShape kShape>
class PrefillLoader {
  using Shape = PrefillMmaShape<D, kShape>;
  static constexpr int kLoadRows = Shape::kLoadRows;
  static constexpr int kChunks = Shape::kChunks;
  static constexpr int kLaneChunks = kLoadRows * kChunks / kWarpSize;  // of keys, and of values

 public:
  // `keys` are those that some row of the block may see: no other is read.
  __device__ PrefillLoader(const PrefillKernelParams& params, PrefillBlock<D, kShape>& block,
                           KeyRange keys)
      : params_(params),
        block_(block),
        keys_(keys),
        lane_(threadIdx.x % kWarpSize),
        warp_(threadIdx.x / kWarpSize) {}

  // Starts with the group's stage that begins with first_key: all but one of the kStages are on
  // their way after it, and the next one's rows are found. stage(i) is the address of the i-th.
  template <class StageFn>
  __device__ void start(int first_key, StageFn&& stage) {
    find_page(first_key);
    find_rows(first_key);
#pragma unroll
    for (int i = 0; i < Shape::kStages - 1; ++i) {
      const int next_key = first_key + (i + 1) * Shape::kStrideKeys;
      find_page(next_key);
      copy(stage(i));
      find_rows(next_key);
    }
  }

  // Looks up the page of this lane's key of the stage that begins with first_key.
  __device__ void find_page(int first_key) {
    const int key = own_key(first_key);
    if (block_.pages == nullptr || !exists(key)) return;
    page_ = place_key(params_.attn, params_.page_shift, block_.pages, key).page;
  }

  // Finds the addresses of that stage's rows. Its page has been looked up, and the stage before has
  // been copied.
  __device__ void find_rows(int first_key) {
    const int key = own_key(first_key);
    const bool there = exists(key);
    valid_ = __ballot_sync(kFullWarp, there);
    stage_exists_ = first_key < keys_.end;
    const auto place = [&](unsigned at, bool is_value) {
      block_.places[warp_][at] = reinterpret_cast<int64_t>(own_address(key, is_value));
    };
    if constexpr (kLoadRows == kWarpSize) {
      if (there) {
        place(lane_, false);
        place(kLoadRows + lane_, true);
      }
    } else {
      if (there) place(lane_, lane_ >= kLoadRows);
    }
    __syncwarp();
  }

  // Starts the copies of the rows that were found last, as one group; there may be none.
  __device__ void copy(uint32_t stage) {
    constexpr unsigned kAll = kLoadRows >= 16 ? kFullWarp : (1u << (2 * kLoadRows % 32)) - 1;
    const uint32_t k_rows = stage + warp_ % Shape::kGroupWarps * (kLoadRows * Shape::kRowBytes);
    if (valid_ == kAll) [[likely]] {
      copy_rows(k_rows);
    } else if (stage_exists_) {
      copy_some_rows(k_rows);
    }
    cp_async_commit();
    __syncwarp();
  }

 private:
  __device__ int own_key(int first_key) const {
    return first_key + static_cast<int>(warp_ % Shape::kGroupWarps * kLoadRows + lane_ % kLoadRows);
  }
  __device__ bool exists(int key) const {
    return lane_ < 2 * kLoadRows && key >= keys_.begin && key < keys_.end;
  }

  __device__ const unsigned char* own_address(int key, bool is_value) const {
    const AttentionParams& attn = params_.attn;
    int slot = key;
    if (params_.page_shift >= 0) {
      slot = key & ((1 << params_.page_shift) - 1);
    } else if (attn.page_size > 0) {
      slot = static_cast<int>(static_cast<unsigned>(key) % static_cast<unsigned>(attn.page_size));
    }
    const int64_t page_stride = is_value ? attn.v_stride_batch : attn.k_stride_batch;
    const int64_t slot_stride = is_value ? attn.v_stride_token : attn.k_stride_token;
    return block_.base[is_value] + (page_ * page_stride + slot * slot_stride) * 2;
  }

  __device__ const unsigned char* row_address(unsigned index) const {
    return reinterpret_cast<const unsigned char*>(block_.places[warp_][index]);
  }

  // Row and chunk of this lane's i-th copy, and where the chunk belongs. Where rows divide a warp
  // evenly all of it follows from the first by constants.
  __device__ unsigned copy_row(int i) const {
    if constexpr (kWarpSize % kChunks == 0) return i * (kWarpSize / kChunks) + lane_ / kChunks;
    return (i * kWarpSize + lane_) / kChunks;
  }
  __device__ unsigned copy_chunk(int i) const {
    if constexpr (kWarpSize % kChunks == 0) return lane_ % kChunks;
    return (i * kWarpSize + lane_) % kChunks;
  }
  __device__ uint32_t copy_target(uint32_t k_rows, int i) const {
    const int row = static_cast<int>(copy_row(i));
    const int chunk = static_cast<int>(copy_chunk(i));
    if constexpr (kWarpSize % kChunks == 0) {
      const int rows = i * (kWarpSize / kChunks);
      const uint32_t first = k_rows + (row - rows) * Shape::kRowBytes +
                             swizzled_chunk<kChunks>(row - rows, chunk) * 16;
      return (first ^ (swizzled_chunk<kChunks>(rows, 0) * 16)) + rows * Shape::kRowBytes;
    }
    return k_rows + row * Shape::kRowBytes + swizzled_chunk<kChunks>(row, chunk) * 16;
  }

  // All addresses first: the scores' registers are free now, and copies that follow one another go
  // out faster.
  __device__ void copy_rows(uint32_t k_rows) const {
    const unsigned char* from[2][kLaneChunks];
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) {
      from[0][i] = row_address(copy_row(i)) + copy_chunk(i) * 16;
      from[1][i] = row_address(kLoadRows + copy_row(i)) + copy_chunk(i) * 16;
    }
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) cp_async_16(copy_target(k_rows, i), from[0][i]);
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) {
      cp_async_16(copy_target(k_rows, i) + Shape::kKeysBytes, from[1][i]);
    }
  }

  // The same where some keys of the stage do not exist; their rows become zeros.
  __device__ void copy_some_rows(uint32_t k_rows) const {
#pragma unroll 1
    for (int i = 0; i < kLaneChunks; ++i) {
      const unsigned row = (i * kWarpSize + lane_) / kChunks;
      const unsigned chunk = (i * kWarpSize + lane_) % kChunks;
      const uint32_t target =
          k_rows + row * Shape::kRowBytes +
          swizzled_chunk<kChunks>(static_cast<int>(row), static_cast<int>(chunk)) * 16;
      const bool there = ((valid_ >> row) & 1) != 0;
#pragma unroll
      for (int is_value = 0; is_value < 2; ++is_value) {
        const unsigned char* from =
            there ? row_address(is_value * kLoadRows + row) + chunk * 16 : block_.base[is_value];
        cp_async_16(target + is_value * Shape::kKeysBytes, from, there);
      }
    }
  }

  const PrefillKernelParams& params_;
  PrefillBlock<D, kShape>& block_;
  const KeyRange keys_;
  const unsigned lane_;
  const unsigned warp_;
  int page_ = 0;
  unsigned valid_ = 0;         // bit r: row r of the warp's keys exists
  bool stage_exists_ = false;  // some row of the block sees the stage
};

}  // namespace astrai::kernels
