#include "support/attn_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "common/counters.h"
#include "kernels/attention/attn_launch.h"
#include "support/test_random.h"

namespace astrai::testing {
namespace {

// Strides of [outer, tokens, heads, dim] in a layout. `salt` makes the gaps of two tensors differ.
std::vector<int64_t> strides_for(Layout layout, int64_t tokens, int64_t heads, int64_t dim,
                                 int64_t salt) {
  switch (layout) {
    case Layout::kPlain:
      return {tokens * heads * dim, heads * dim, dim, 1};
    case Layout::kHeadsFirst:
      return {heads * tokens * dim, dim, tokens * dim, 1};
    case Layout::kInterleaved:
    case Layout::kAligned:
      break;
  }
  const int64_t unit = layout == Layout::kAligned ? 8 : 1;
  const int64_t head_stride = dim + (3 + salt) * unit;
  const int64_t token_stride = (2 * heads + 1) * head_stride + salt * unit;
  return {tokens * token_stride + 5 * unit, token_stride, head_stride, 1};
}

std::vector<int64_t> without_first(std::vector<int64_t> strides) {
  strides.erase(strides.begin());
  return strides;
}

// The tensors of one call.
struct Call {
  TestTensor q, k, v, out, lse, mask, sinks, o_part, ml_part;
  TestTensor qo_indptr, kv_indptr, kv_indices, kv_lens, offsets;
};

class Layouter {
 public:
  Layouter(Device device, const AttnCase& test, const AttnNumbers& numbers)
      : device_(device), test_(test), numbers_(numbers) {}

  Call build() {
    if (test_.is_paged()) {
      lay_pages();
    } else {
      lay_dense_kv();
    }
    lay_queries();
    lay_options();
    return std::move(call_);
  }

 private:
  bool ragged() const { return test_.op == AttnOp::kPagedPrefill; }

  TestTensor tensor(DType dtype, std::vector<int64_t> shape) const {
    return TestTensor(device_, dtype, std::move(shape), test_.poison);
  }

  TestTensor whole_numbers(const std::vector<int64_t>& values) const {
    TestTensor result = tensor(DType::kInt32, {static_cast<int64_t>(values.size())});
    for (size_t i = 0; i < values.size(); ++i) {
      result.set({static_cast<int64_t>(i)}, static_cast<double>(values[i]));
    }
    return result;
  }

  void copy_token(TestTensor& to, int64_t outer, int64_t token, const std::vector<float>& from,
                  int64_t row) const {
    for (int64_t head = 0; head < test_.num_kv_heads; ++head) {
      for (int64_t d = 0; d < test_.head_dim; ++d) {
        to.set({outer, token, head, d},
               from[static_cast<size_t>((row * test_.num_kv_heads + head) * test_.head_dim + d)]);
      }
    }
  }

  void lay_dense_kv() {
    const int64_t kv_len = test_.longest_kv();
    const std::vector<int64_t> shape{test_.num_requests(), kv_len, test_.num_kv_heads,
                                     test_.head_dim};
    call_.k = TestTensor(device_, test_.dtype, shape,
                         strides_for(test_.layout, kv_len, test_.num_kv_heads, test_.head_dim, 1),
                         test_.poison);
    call_.v = TestTensor(device_, test_.dtype, shape,
                         strides_for(test_.layout, kv_len, test_.num_kv_heads, test_.head_dim, 2),
                         test_.poison);
    for (int64_t b = 0; b < test_.num_requests(); ++b) {
      for (int64_t token = 0; token < kv_len; ++token) {
        copy_token(call_.k, b, token, numbers_.k, b * kv_len + token);
        copy_token(call_.v, b, token, numbers_.v, b * kv_len + token);
      }
    }
  }

  // Pages in random order with unused ones between them; page lists with wild entries after the
  // last used one, inside the request's own range and past the end of all.
  void lay_pages() {
    Random random(test_.seed + 17);
    const int64_t page_size = test_.page_size;
    int64_t used = 0;
    for (int64_t kv_len : test_.kv_lens) used += (kv_len + page_size - 1) / page_size;
    const int64_t num_pages = used + 3;
    std::vector<int64_t> order(static_cast<size_t>(num_pages));
    for (int64_t i = 0; i < num_pages; ++i) order[static_cast<size_t>(i)] = i;
    random.shuffle(order);

    const std::vector<int64_t> shape{num_pages, page_size, test_.num_kv_heads, test_.head_dim};
    const auto strides = [&](int64_t salt) {
      return strides_for(test_.layout, page_size, test_.num_kv_heads, test_.head_dim, salt);
    };
    call_.k = TestTensor(device_, test_.dtype, shape, strides(1), test_.poison);
    call_.v = TestTensor(device_, test_.dtype, shape, strides(2), test_.poison);
    std::vector<int64_t> indptr{0};
    std::vector<int64_t> indices;
    size_t next_page = 0;
    for (size_t b = 0; b < test_.kv_lens.size(); ++b) {
      for (int64_t token = 0; token < test_.kv_lens[b]; ++token) {
        if (token % page_size == 0) indices.push_back(order[next_page++]);
        const int64_t row = numbers_.kv_begin[b] + token;
        copy_token(call_.k, indices.back(), token % page_size, numbers_.k, row);
        copy_token(call_.v, indices.back(), token % page_size, numbers_.v, row);
      }
      for (size_t i = 0; i < b % 3; ++i) indices.push_back(i == 0 ? 1999999999 : -7);
      indptr.push_back(static_cast<int64_t>(indices.size()));
    }
    indices.push_back(-2000000000);
    call_.kv_indptr = whole_numbers(indptr);
    call_.kv_indices = whole_numbers(indices);
    call_.kv_lens = whole_numbers(test_.kv_lens);
  }

  void lay_queries() {
    const int64_t heads = test_.num_q_heads;
    const int64_t dim = test_.head_dim;
    const int64_t tokens = ragged() ? test_.total_q() : test_.is_decode() ? 1 : test_.longest_q();
    std::vector<int64_t> q_strides = strides_for(test_.layout, tokens, heads, dim, 3);
    std::vector<int64_t> out_strides = strides_for(test_.layout, tokens, heads, dim, 5);
    std::vector<int64_t> shape{test_.num_requests(), tokens, heads, dim};
    if (ragged()) {
      shape = without_first(shape);
      q_strides = without_first(q_strides);
      out_strides = without_first(out_strides);
    }
    call_.q = TestTensor(device_, test_.dtype, shape, q_strides, test_.poison);
    // The output starts as NaN whatever the poison, so that an unwritten element shows.
    call_.out = TestTensor(device_, test_.dtype, shape, out_strides, Poison::kNan);
    for (int64_t row = 0; row < test_.total_q(); ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        for (int64_t d = 0; d < dim; ++d) {
          const double value = numbers_.q[static_cast<size_t>((row * heads + head) * dim + d)];
          if (ragged()) {
            call_.q.set({row, head, d}, value);
          } else {
            call_.q.set({row / tokens, row % tokens, head, d}, value);
          }
        }
      }
    }
    const int64_t b = test_.num_requests();
    if (test_.op == AttnOp::kPagedDecode) {
      call_.lse = TestTensor(device_, DType::kFloat32, {b, heads}, Poison::kNan);
    } else if (ragged()) {
      call_.lse = TestTensor(device_, DType::kFloat32, {tokens, heads}, Poison::kNan);
      call_.qo_indptr = whole_numbers(numbers_.q_begin);
    } else {
      call_.lse = TestTensor(device_, DType::kFloat32, {b, heads, tokens}, Poison::kNan);
    }
  }

  void lay_options() {
    const int64_t b = test_.num_requests();
    if (test_.mask != MaskKind::kNone) {
      // Strides of a wider mask, so that rows do not follow one another.
      const int64_t keys = numbers_.mask_keys;
      const bool per_query = test_.mask == MaskKind::kPerQuery;
      const int64_t rows = per_query ? test_.longest_q() : 1;
      const std::vector<int64_t> shape =
          per_query ? std::vector<int64_t>{b, rows, keys} : std::vector<int64_t>{b, keys};
      const std::vector<int64_t> strides =
          per_query ? std::vector<int64_t>{rows * (2 * keys + 3) + 1, 2 * keys + 3, 2}
                    : std::vector<int64_t>{keys + 3, 1};
      call_.mask = TestTensor(device_, DType::kBool, shape, strides, Poison::kNan);
      for (int64_t row = 0; row < b * rows; ++row) {
        for (int64_t key = 0; key < keys; ++key) {
          const double keep = numbers_.mask[static_cast<size_t>(row * keys + key)];
          if (per_query) {
            call_.mask.set({row / rows, row % rows, key}, keep);
          } else {
            call_.mask.set({row, key}, keep);
          }
        }
      }
    }
    if (test_.sinks) {
      call_.sinks = tensor(DType::kFloat32, {test_.num_q_heads});
      for (int64_t h = 0; h < test_.num_q_heads; ++h) {
        call_.sinks.set({h}, numbers_.sinks[static_cast<size_t>(h)]);
      }
    }
    if (test_.causal == CausalKind::kPerRequest) {
      call_.offsets = whole_numbers(test_.causal_offsets);
    }
    if (test_.partials != PartialsKind::kOwn) {
      const int64_t more = test_.partials == PartialsKind::kOversized ? 2 : 0;
      const int64_t splits = std::max<int64_t>(1, test_.num_splits) + more;
      call_.o_part =
          TestTensor(device_, DType::kFloat32,
                     {b + more, test_.num_q_heads, splits, test_.head_dim}, Poison::kNan);
      call_.ml_part = TestTensor(device_, DType::kFloat32, {b + more, test_.num_q_heads, splits, 2},
                                 Poison::kNan);
    }
  }

  Device device_;
  const AttnCase& test_;
  const AttnNumbers& numbers_;
  Call call_;
};

void launch(const AttnCase& test, Call& call) {
  const TensorView q = call.q.upload();
  const TensorView k = call.k.upload();
  const TensorView v = call.v.upload();
  const TensorView out = call.out.upload();
  const TensorView lse = call.lse.upload();
  TensorView mask, sinks, o_part, ml_part;
  kernels::AttentionOptions options;
  if (test.mask != MaskKind::kNone) {
    mask = call.mask.upload();
    options.mask = &mask;
  }
  if (test.sinks) {
    sinks = call.sinks.upload();
    options.sinks = &sinks;
  }
  if (test.partials != PartialsKind::kOwn) {
    o_part = call.o_part.upload();
    ml_part = call.ml_part.upload();
    options.o_part = &o_part;
    options.ml_part = &ml_part;
  }
  if (test.want_lse) options.lse = &lse;
  options.window = test.window;
  options.softcap = test.softcap;
  options.scale = test.scale;
  options.num_splits = test.num_splits;

  if (!test.is_paged()) {
    const int64_t offset = test.causal == CausalKind::kFixed ? test.causal_offset : -1;
    if (test.is_decode()) {
      kernels::attn_decode(q, k, v, out, offset, options);
    } else {
      kernels::attn_prefill(q, k, v, out, offset, options);
    }
    return;
  }
  const TensorView kv_indptr = call.kv_indptr.upload();
  const TensorView kv_indices = call.kv_indices.upload();
  const TensorView kv_lens = call.kv_lens.upload();
  const kernels::PagedKv kv{k, v, kv_indptr, kv_indices, kv_lens};
  if (test.is_decode()) {
    kernels::attn_paged_decode(q, kv, out, options);
    return;
  }
  TensorView offsets;
  kernels::PagedCausal causal{.from_lengths = test.causal == CausalKind::kFromLengths};
  if (test.causal == CausalKind::kFixed) causal.offset = test.causal_offset;
  if (test.causal == CausalKind::kPerRequest) {
    offsets = call.offsets.upload();
    causal.offsets = &offsets;
  }
  const TensorView qo_indptr = call.qo_indptr.upload();
  kernels::attn_paged_prefill(q, kv, qo_indptr, out, causal, options);
}

std::vector<TestTarget> targets_for(const AttnCase& test) {
  return test.is_decode() ? all_test_targets() : prefill_test_targets();
}

std::string text_of(double value) {
  return std::to_string(value);
}

// Both NaN, both the same infinity, or close.
bool agrees(double found, double expected, double tolerance) {
  if (std::isnan(expected)) return std::isnan(found);
  if (std::isinf(expected)) return found == expected;
  return std::abs(found - expected) <= tolerance;
}

}  // namespace

AttnResult run_attention(const TestTarget& target, const AttnCase& test,
                         const AttnNumbers& numbers) {
  target.activate();
  Call call = Layouter(target.device, test, numbers).build();
  AttnResult result;
  const int64_t launches = counters().launches;
  launch(test, call);
  result.launches = counters().launches - launches;
  call.out.download();
  call.lse.download();
  result.surroundings_intact = call.out.surroundings_intact() && call.lse.surroundings_intact();
  if (test.partials != PartialsKind::kOwn) {
    call.o_part.download();
    call.ml_part.download();
    result.surroundings_intact &=
        call.o_part.surroundings_intact() && call.ml_part.surroundings_intact();
  }
  const bool ragged = test.op == AttnOp::kPagedPrefill;
  const int64_t tokens = test.longest_q();
  for (int64_t row = 0; row < test.total_q(); ++row) {
    for (int64_t head = 0; head < test.num_q_heads; ++head) {
      for (int64_t d = 0; d < test.head_dim; ++d) {
        result.out.push_back(ragged ? call.out.get({row, head, d})
                                    : call.out.get({row / tokens, row % tokens, head, d}));
      }
      if (!test.want_lse) continue;
      result.lse.push_back(test.is_paged() ? call.lse.get({row, head})
                                           : call.lse.get({row / tokens, head, row % tokens}));
    }
  }
  result.out_bytes = call.out.element_bytes();
  result.lse_bytes = call.lse.element_bytes();
  return result;
}

void for_each_result(const AttnCase& test, const AttnNumbers& numbers,
                     const std::function<void(const AttnResult&)>& check) {
  for (const TestTarget& target : targets_for(test)) {
    SCOPED_TRACE(concat(target.name(), ": ", test.name(), ", ASTRAI_TEST_SEED=", test_seed()));
    check(run_attention(target, test, numbers));
  }
}

void expect_exact(const AttnCase& test) {
  expect_exact(test, make_numbers(test));
}

void expect_exact(const AttnCase& test, const AttnNumbers& numbers) {
  const AttnAnswer answer = exact_answer(test, numbers);
  for_each_result(test, numbers, [&](const AttnResult& result) {
    EXPECT_TRUE(result.surroundings_intact);
    ASSERT_EQ(result.out.size(), answer.out.size());
    int failures = 0;
    for (size_t i = 0; i < answer.out.size() && failures < 3; ++i) {
      const double tolerance = out_tolerance(test.dtype, answer.out[i]);
      if (agrees(result.out[i], answer.out[i], tolerance)) continue;
      ++failures;
      const auto row = static_cast<int64_t>(i) / test.head_dim;
      ADD_FAILURE() << "out[row " << row / test.num_q_heads << ", head " << row % test.num_q_heads
                    << ", " << static_cast<int64_t>(i) % test.head_dim << "] is "
                    << text_of(result.out[i]) << "; expected " << text_of(answer.out[i]);
    }
    for (size_t i = 0; i < result.lse.size() && failures < 3; ++i) {
      if (agrees(result.lse[i], answer.lse[i], lse_tolerance(answer.lse[i]))) continue;
      ++failures;
      ADD_FAILURE() << "lse[" << i << "] is " << text_of(result.lse[i]) << "; expected "
                    << text_of(answer.lse[i]);
    }
  });
}

void expect_poison_is_not_read(AttnCase test) {
  const AttnNumbers numbers = make_numbers(test);
  for (const TestTarget& target : targets_for(test)) {
    test.poison = Poison::kZero;
    const AttnResult clean = run_attention(target, test, numbers);
    for (Poison poison : {Poison::kNan, Poison::kInf}) {
      test.poison = poison;
      SCOPED_TRACE(concat(target.name(), ": ", test.name(), ", ASTRAI_TEST_SEED=", test_seed()));
      const AttnResult result = run_attention(target, test, numbers);
      EXPECT_EQ(result.out_bytes, clean.out_bytes);
      EXPECT_EQ(result.lse_bytes, clean.lse_bytes);
      EXPECT_TRUE(result.surroundings_intact);
      for (double value : result.out) ASSERT_TRUE(std::isfinite(value));
    }
  }
}

}  // namespace astrai::testing
