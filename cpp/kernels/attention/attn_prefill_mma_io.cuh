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

// Two block shapes. The wide one reads each fragment of a key or value once for 32 rows, half the
// shared memory traffic for a matrix instruction, which is what limits 16 rows on large devices.
// The narrow one has half the rows, for batches with few of them.
template <int D, bool kWide>
struct PrefillMmaShape {
  static_assert(!kWide || D <= kMaxWidePrefillHeadDim);
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMTiles = kWide ? 2 : 1;  // m16 tiles of a warp
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kTileKeys = D > 128 ? 32 : 64;  // the same in both shapes: see the kernel
  static constexpr bool kSharedQ = kWide && D >= 64;   // else in registers
  static constexpr int kStages = D > 128 ? 3 : 2;
  static constexpr int kBlocksPerSm = kWide ? (D <= 64 ? 3 : 2) : (D <= 64 ? 4 : D <= 128 ? 3 : 2);
  static constexpr int kChunks = D / 8;  // 16-byte chunks of a row
  static constexpr int kRowBytes = D * 2;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kQBytes = kRows * kRowBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + (kSharedQ ? kQBytes : 0);
  static constexpr int kLoadRows = kTileKeys / kWarps;  // rows of a tile that a warp loads
  static_assert(kSharedQ || kQBytes <= kStageBytes, "queries pass through a stage");
  static_assert((kLoadRows * kChunks) % kWarpSize == 0 && 2 * kLoadRows <= kWarpSize);
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

// Zeros in place of the values of a tile that are not finite. All threads of the block call it.
template <class T, int D, bool kWide>
__device__ void clear_wild_values(uint32_t v_tile) {
  using Shape = PrefillMmaShape<D, kWide>;
  for (int at = static_cast<int>(threadIdx.x) * 4; at < Shape::kTileBytes;
       at += Shape::kThreads * 4) {
    const uint32_t pair = load_shared_u32(v_tile + at);
    const uint32_t low = is_wild<T>(pair) ? 0 : pair & 0xffffu;
    const uint32_t high = is_wild<T>(pair >> 16) ? 0 : pair & 0xffff0000u;
    if ((low | high) != pair) store_shared_u32(v_tile + at, low | high);
  }
}

// ---- queries and results --------------------

// Calls fn(row, chunk, address) for this lane's share of the 16-byte chunks of its warp's rows;
// `row` counts within the block's tile, `address` is in shared memory.
template <int D, bool kWide, class Fn>
__device__ inline void for_each_row_chunk(uint32_t shared, Fn&& fn) {
  using Shape = PrefillMmaShape<D, kWide>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarpSize * Shape::kWarpRows;
#pragma unroll 4
  for (int index = lane; index < Shape::kWarpRows * Shape::kChunks; index += kWarpSize) {
    const int row = warp_row + index / Shape::kChunks;
    const int chunk = index % Shape::kChunks;
    fn(row, chunk,
       shared + row * Shape::kRowBytes + swizzled_chunk<Shape::kChunks>(row, chunk) * 16);
  }
}

// Starts the way of the warp's query rows to shared memory; rows that the tile lacks are zeros.
template <class T, int D, bool kWide>
__device__ void load_q_rows(const PrefillKernelParams& params, const PrefillTile& tile,
                            uint32_t shared) {
  const T* q = static_cast<const T*>(params.attn.q);
  for_each_row_chunk<D, kWide>(shared, [&](int row, int chunk, uint32_t address) {
    const bool there = row < tile.num_rows;
    const T* source = q + (there ? tile.q_offset(params, row) : 0) + chunk * 8;
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
  });
}

template <class T, int D, bool kWide>
__device__ void store_rows(const PrefillKernelParams& params, const PrefillTile& tile,
                           uint32_t shared) {
  T* out = static_cast<T*>(params.attn.out);
  for_each_row_chunk<D, kWide>(shared, [&](int row, int chunk, uint32_t address) {
    if (row >= tile.num_rows) return;
    const uint4 eight = load_shared_u128(address);
    T* target = out + tile.out_offset(params, row) + chunk * 8;
    if (params.out_vectors) {
      *reinterpret_cast<uint4*>(target) = eight;
    } else {
      const T* elements = reinterpret_cast<const T*>(&eight);
#pragma unroll
      for (int i = 0; i < 8; ++i) target[i] = elements[i];
    }
  });
}

// ---- keys and values --------------------

// Brings one tile of keys and values after the other to shared memory, kStages - 1 ahead of their
// use. A warp loads kLoadRows rows of each: lane i finds the address of key row i, lane
// kLoadRows + i that of value row i.
template <int D, bool kWide>
class PrefillTileLoader {
  using Shape = PrefillMmaShape<D, kWide>;
  static constexpr int kTileKeys = Shape::kTileKeys;
  static constexpr int kLoadRows = Shape::kLoadRows;
  static constexpr int kChunks = Shape::kChunks;
  static constexpr int kAhead = Shape::kStages - 1;

 public:
  // `keys` are those that some row of the block may see; `addresses` has an entry for each thread.
  __device__ PrefillTileLoader(const PrefillKernelParams& params, const PrefillTile& tile,
                               KeyRange keys, uint32_t stages, const unsigned char** addresses)
      : params_(params),
        keys_(keys),
        stages_(stages),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        warp_first_(static_cast<int>(threadIdx.x) / kWarpSize * kLoadRows),
        addresses_(addresses + threadIdx.x / kWarpSize * kWarpSize) {
    const AttentionParams& attn = params.attn;
    const bool is_value = lane_ >= kLoadRows;
    const int64_t head = tile.kv_head * (is_value ? attn.v_stride_head : attn.k_stride_head);
    const int64_t batch = is_value ? attn.v_stride_batch : attn.k_stride_batch;
    base_ = static_cast<const unsigned char*>(is_value ? attn.v : attn.k) + head * 2;
    if (attn.page_size > 0) {
      pages_ = attn.kv_indices + attn.kv_indptr[tile.request];
    } else {
      base_ += tile.request * batch * 2;
    }
    first_tile_ = keys.begin / kTileKeys;
    num_tiles_ = keys.begin < keys.end ? (keys.end - 1) / kTileKeys + 1 - first_tile_ : 0;
  }

  __device__ int num_tiles() const { return num_tiles_; }
  __device__ int first_key(int index) const { return (first_tile_ + index) * kTileKeys; }
  __device__ uint32_t tile_address(int index) const {
    return stages_ + index % Shape::kStages * Shape::kStageBytes;
  }

  // Begins with the first tile; every warp must have left the stages alone.
  __device__ void start() {
    next_ = 0;
    find_next();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_next();
  }

  // Starts the loads of the next tile, if there is one, as one group of copies.
  __device__ void load_next() {
    if (next_ < num_tiles_) load_tile();
    cp_async_commit();
    ++next_;
    find_next();
  }

 private:
  // Looks up where this lane's key of tile next_ lies.
  __device__ void find_next() {
    const int key = first_key(next_) + warp_first_ + lane_ % kLoadRows;
    valid_ = next_ < num_tiles_ && lane_ < 2 * kLoadRows && key >= keys_.begin && key < keys_.end;
    if (valid_) place_ = place_key(params_.attn, params_.page_shift, pages_, key);
  }

  __device__ void load_tile() {
    const AttentionParams& attn = params_.attn;
    const bool is_value = lane_ >= kLoadRows;
    const unsigned valid = __ballot_sync(kFullWarp, valid_);
    __syncwarp();  // the addresses of the tile before have been read
    if (valid_) {
      const int64_t page_stride = is_value ? attn.v_stride_batch : attn.k_stride_batch;
      const int64_t slot_stride = is_value ? attn.v_stride_token : attn.k_stride_token;
      addresses_[lane_] = base_ + (place_.page * page_stride + place_.slot * slot_stride) * 2;
    }
    __syncwarp();
    constexpr unsigned kAll = 2 * kLoadRows == 32 ? kFullWarp : (1u << (2 * kLoadRows % 32)) - 1;
    if (valid == kAll) {
      copy_rows<true>(valid);
    } else {
      copy_rows<false>(valid);
    }
  }

  // Where chunk `chunk` of row `row`, the i-th of this lane, belongs. Where rows divide a warp
  // evenly it is one exclusive-or away from that of the first, and nothing need be kept from tile
  // to tile.
  __device__ uint32_t chunk_target(uint32_t k_rows, int i, int row, int chunk) const {
    if constexpr (kWarpSize % kChunks == 0) {
      const int first_row = lane_ / kChunks;
      const uint32_t first =
          k_rows + first_row * Shape::kRowBytes + swizzled_chunk<kChunks>(first_row, chunk) * 16;
      const int rows = i * (kWarpSize / kChunks);
      return (first ^ (swizzled_chunk<kChunks>(rows, 0) * 16)) + rows * Shape::kRowBytes;
    } else {
      return k_rows + row * Shape::kRowBytes + swizzled_chunk<kChunks>(row, chunk) * 16;
    }
  }

  template <bool kFull>
  __device__ void copy_rows(unsigned valid) {
    const uint32_t k_rows = tile_address(next_) + warp_first_ * Shape::kRowBytes;
#pragma unroll
    for (int i = 0; i < kLoadRows * kChunks / kWarpSize; ++i) {
      const int index = i * kWarpSize + lane_;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const uint32_t target = chunk_target(k_rows, i, row, chunk);
      if constexpr (kFull) {
        cp_async_16(target, addresses_[row] + chunk * 16);
        cp_async_16(target + Shape::kTileBytes, addresses_[kLoadRows + row] + chunk * 16);
      } else {
        const bool there = ((valid >> row) & 1) != 0;
        cp_async_16(target, there ? addresses_[row] + chunk * 16 : base_, there);
        cp_async_16(target + Shape::kTileBytes,
                    there ? addresses_[kLoadRows + row] + chunk * 16 : base_, there);
      }
    }
  }

  const PrefillKernelParams& params_;
  const KeyRange keys_;
  const uint32_t stages_;
  const int lane_;
  const int warp_first_;  // first row that the warp loads of a tile
  const unsigned char** const addresses_;
  const unsigned char* base_;       // of the tensor whose addresses this lane finds
  const int32_t* pages_ = nullptr;  // of the request; null when dense
  int first_tile_;
  int num_tiles_;
  int next_ = 0;        // tile that is loaded next
  bool valid_ = false;  // this lane's key of it exists
  KeyPlace place_{0, 0};
};

}  // namespace astrai::kernels
