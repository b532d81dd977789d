// What the attention kernels share: which keys a row sees, where their memory is, how scores become
// weights, how a row is finished. Included only by sources that are compiled once per instruction
// set, so everything lives in that set's namespace.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "kernels/attention/attn_params.h"
#include "kernels/cpu/vec.h"

namespace astrai::kernels::cpu::ASTRAI_ISA {

constexpr float kNegInf = -__builtin_inff();

// Keys that are scored together; one online-softmax step each.
constexpr int kTileKeys = 64;

inline int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
inline int64_t max_of(int64_t a, int64_t b) {
  return a > b ? a : b;
}
inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int round_up(int a, int b) {
  return (a + b - 1) / b * b;
}

// ---- one request --------------------

struct KeyRange {
  int64_t first;
  int64_t last;  // one past the end; >= first
};

struct Request {
  int64_t index;
  int64_t q_begin;       // first row in q when ragged, else 0
  int64_t q_len;         // query rows
  int64_t kv_len;        // keys
  int64_t position;      // of row 0 on the key axis
  bool causal;           // rows see no key past their position
  const int32_t* pages;  // page list, null when dense
};

inline Request load_request(const AttentionParams& params, int64_t index) {
  Request request{.index = index,
                  .q_begin = 0,
                  .q_len = params.q_len,
                  .kv_len = params.kv_len,
                  .position = 0,
                  .causal = true,
                  .pages = nullptr};
  if (params.qo_indptr != nullptr) {
    request.q_begin = params.qo_indptr[index];
    request.q_len = params.qo_indptr[index + 1] - request.q_begin;
  }
  if (params.page_size > 0) {
    request.kv_len = params.kv_lens[index];
    request.pages = params.kv_indices + params.kv_indptr[index];
  }
  int64_t offset = kNotCausal;
  if (params.causal_mode == CausalMode::kFixed) offset = params.causal_offset;
  if (params.causal_mode == CausalMode::kPerRequest) offset = params.causal_offsets[index];
  request.causal = offset != kNotCausal || params.causal_mode == CausalMode::kFromLengths;
  request.position = offset != kNotCausal ? offset : request.kv_len - request.q_len;
  return request;
}

// The keys that a row may see, before the mask is looked at.
inline KeyRange visible_keys(const AttentionParams& params, const Request& request, int64_t row) {
  const int64_t position = request.position + row;
  int64_t first = 0;
  int64_t last = request.kv_len;
  if (request.causal) last = min_of(last, position + 1);
  if (params.window >= 1) first = max_of(first, position - params.window + 1);
  if (params.mask != nullptr) {
    last = row < params.mask_q_len ? min_of(last, params.mask_kv_len) : 0;
  }
  return {first, max_of(first, last)};
}

inline const uint8_t* mask_row(const AttentionParams& params, const Request& request, int64_t row) {
  if (params.mask == nullptr) return nullptr;
  return params.mask + request.index * params.mask_stride_batch + row * params.mask_stride_q;
}

template <class T>
const T* q_row(const AttentionParams& params, const Request& request, int64_t row, int64_t head) {
  return static_cast<const T*>(params.q) + request.index * params.q_stride_batch +
         (request.q_begin + row) * params.q_stride_token + head * params.q_stride_head;
}

template <class T>
T* out_row(const AttentionParams& params, const Request& request, int64_t row, int64_t head) {
  return static_cast<T*>(params.out) + request.index * params.out_stride_batch +
         (request.q_begin + row) * params.out_stride_token + head * params.out_stride_head;
}

inline float* lse_entry(const AttentionParams& params, const Request& request, int64_t row,
                        int64_t head) {
  return params.lse + request.index * params.lse_stride_batch +
         (request.q_begin + row) * params.lse_stride_token + head * params.lse_stride_head;
}

// ---- where keys are --------------------

// Addresses of up to kTileKeys visible keys and values, of KV head 0.
template <class T>
struct KeyRows {
  int count;
  const T* k[kTileKeys];
  const T* v[kTileKeys];
};

// Walks the keys [key, end) of a request in order, through the page list where there is one. Only
// pages that hold such keys are looked up.
template <class T>
struct KeyWalk {
  const AttentionParams& params;
  const Request& request;
  const uint8_t* mask;  // of one row; null = all visible
  int64_t key;
  int64_t end;

  // The next keys that the mask keeps: a full tile of them, or what is left. Unused entries of a
  // tile that is not empty repeat its last row, so that readers may round the count up.
  void next(KeyRows<T>& rows) {
    int count = 0;
    while (key < end && count < kTileKeys) {
      int64_t run_end = end;
      int64_t block = request.index;
      int64_t token = key;
      if (request.pages != nullptr) {
        const int64_t page = key / params.page_size;
        run_end = min_of(end, (page + 1) * params.page_size);
        block = request.pages[page];
        token = key - page * params.page_size;
      }
      const T* k = static_cast<const T*>(params.k) + block * params.k_stride_batch +
                   token * params.k_stride_token;
      const T* v = static_cast<const T*>(params.v) + block * params.v_stride_batch +
                   token * params.v_stride_token;
      run_end = mask == nullptr ? min_of(run_end, key + kTileKeys - count) : run_end;
      for (; key < run_end && count < kTileKeys; ++key) {
        rows.k[count] = k;
        rows.v[count] = v;
        k += params.k_stride_token;
        v += params.v_stride_token;
        count += mask == nullptr || mask[key * params.mask_stride_kv] != 0;
      }
    }
    rows.count = count;
    for (int i = count; count > 0 && i < kTileKeys; ++i) {
      rows.k[i] = rows.k[count - 1];
      rows.v[i] = rows.v[count - 1];
    }
  }
};

// ---- rows in an order of their own --------------------

// Rows are read in pairs of vectors, in an order that suits the element type: of bf16, half 0 of a
// pair is its even elements and half 1 its odd ones, which take one instruction each. Dot products
// do not mind as long as both sides are read alike; accumulators are put back in order at the end.
constexpr int kPairLanes = 2 * VecF::kLanes;

template <class T>
inline VecF vload_half(const T* pair, int half) {
  return vload(pair + half * VecF::kLanes);
}

// Stores the halves of one pair in memory order.
template <class T>
inline void vstore_pair(float* p, VecF half0, VecF half1) {
  vstore(p, half0);
  vstore(p + VecF::kLanes, half1);
}

#if defined(__AVX512F__)

template <>
inline VecF vload_half<bf16>(const bf16* pair, int half) {
  const __m512i raw = _mm512_loadu_si512(pair);
  return {_mm512_castsi512_ps(half == 0 ? _mm512_slli_epi32(raw, 16)
                                        : _mm512_and_si512(raw, _mm512_set1_epi32(-65536)))};
}

template <>
inline void vstore_pair<bf16>(float* p, VecF half0, VecF half1) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(half0.v, low, half1.v));
  _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(half0.v, high, half1.v));
}

// Sums of the lanes of four vectors.
inline void vreduce_add4(const VecF* a, float* sums) {
  __m256 half[4];
  for (int i = 0; i < 4; ++i) {
    half[i] = _mm256_add_ps(_mm512_castps512_ps256(a[i].v), _mm512_extractf32x8_ps(a[i].v, 1));
  }
  const __m256 all =
      _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

#elif defined(__AVX2__)

alignas(32) constexpr uint32_t kUpperHalves[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                  0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                  0xffff0000u, 0xffff0000u};

template <>
inline VecF vload_half<bf16>(const bf16* pair, int half) {
  if (half == 0) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(raw, 16))};
  }
  // The inner loops need all sixteen registers. Written with intrinsics, the compiler keeps the
  // mask in one, and the raw pair in another, and spills accumulators to do so.
  __m256i upper;
  asm("vmovdqa %1, %0\n\tvpand %2, %0, %0"
      : "=x"(upper)
      : "m"(kUpperHalves), "m"(*reinterpret_cast<const bf16(*)[16]>(pair)));
  return {_mm256_castsi256_ps(upper)};
}

template <>
inline void vstore_pair<bf16>(float* p, VecF half0, VecF half1) {
  const __m256 low = _mm256_unpacklo_ps(half0.v, half1.v);
  const __m256 high = _mm256_unpackhi_ps(half0.v, half1.v);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

inline void vreduce_add4(const VecF* a, float* sums) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a[0].v, a[1].v), _mm256_hadd_ps(a[2].v, a[3].v));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

#else

inline void vreduce_add4(const VecF* a, float* sums) {
  for (int i = 0; i < 4; ++i) sums[i] = vreduce_add(a[i]);
}

#endif

// A row of D elements as vectors, two to a pair; where D is an odd number of vectors the last
// pair's second half is zero.
template <int D>
constexpr int kPairs = (D + kPairLanes - 1) / kPairLanes;
template <int D>
constexpr int kPaddedDim = kPairs<D> * kPairLanes;

template <int D, class T>
inline VecF load_row(const T* row, int pair, int half) {
  const T* at = row + pair * kPairLanes;
  if constexpr (D % kPairLanes != 0) {
    if (pair == D / kPairLanes) return half == 0 ? vload(at) : vzero();
  }
  return vload_half(at, half);
}

// From the order of load_row<D, T> back to memory order, in place. `row` holds kPaddedDim<D>.
template <int D, class T>
inline void restore_order(float* row) {
  for (int pair = 0; pair < D / kPairLanes; ++pair) {
    float* at = row + pair * kPairLanes;
    vstore_pair<T>(at, vload(at), vload(at + VecF::kLanes));
  }
}

// ---- scores and weights --------------------

// softcap * tanh(x / softcap). For large |x|, tanh(y) = 1 - 2 / (exp(2 |y|) + 1) with y's sign;
// near zero, where that loses its digits, the Taylor series up to y^11, whose error at 0.25 is
// below 1e-8 of the value.
inline VecF apply_softcap(VecF x, float softcap) {
  const VecF y = x * vset1(1.0f / softcap);
  const VecF magnitude = vmax(y, vzero() - y);
  const VecF two = vset1(2.0f);
  const VecF one = vset1(1.0f);
  const VecF positive = one - two / (vexp(two * magnitude) + one);
  const VecF far = vselect_lt(y, vzero(), vzero() - positive, positive);
  const VecF square = y * y;
  VecF series = vset1(-1382.0f / 155925.0f);
  series = vfma(series, square, vset1(62.0f / 2835.0f));
  series = vfma(series, square, vset1(-17.0f / 315.0f));
  series = vfma(series, square, vset1(2.0f / 15.0f));
  series = vfma(series, square, vset1(-1.0f / 3.0f));
  const VecF near = vfma(series * square, y, y);
  return vset1(softcap) * vselect_lt(magnitude, vset1(0.25f), near, far);
}

inline float exp_one(float x) {
  float lanes[VecF::kLanes];
  vstore(lanes, vexp(vset1(x)));
  return lanes[0];
}

// The running softmax of one row: maximum logit and sum of exp(logit - maximum) so far.
struct RowSoftmax {
  float max = kNegInf;
  float sum = 0.0f;
};

inline void cap_scores(float* scores, int count, float softcap) {
  for (int i = 0; i < count; i += VecF::kLanes) {
    vstore(scores + i, apply_softcap(vload(scores + i), softcap));
  }
}

// Turns a tile's scores (`count` of them, in an array of kTileKeys; hidden ones are -inf) into
// weights relative to the new maximum, with zeros up to a whole vector. Returns the factor that
// takes what has been accumulated so far to the new maximum. NaN scores give NaN sums.
// Source: online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867.
inline float softmax_tile(float* scores, int count, RowSoftmax& row) {
  const int padded = round_up(count, VecF::kLanes);
  for (int i = count; i < padded; ++i) scores[i] = kNegInf;
  VecF top = vset1(row.max);
  for (int i = 0; i < padded; i += VecF::kLanes) top = vmax(vload(scores + i), top);
  const float new_max = vreduce_max(top);
  // With nothing visible so far any finite number will do: exp(-inf - 0) is 0.
  const VecF subtract = vset1(new_max == kNegInf ? 0.0f : new_max);
  VecF sum = vzero();
  for (int i = 0; i < padded; i += VecF::kLanes) {
    const VecF weight = vexp(vload(scores + i) - subtract);
    vstore(scores + i, weight);
    sum = sum + weight;
  }
  const float factor = row.max == kNegInf ? 0.0f : exp_one(row.max - new_max);
  row.sum = row.sum * factor + vreduce_add(sum);
  row.max = new_max;
  return factor;
}

}  // namespace astrai::kernels::cpu::ASTRAI_ISA
