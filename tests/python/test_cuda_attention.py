"""Attention on a CUDA device through the bindings, against float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import attention_reference as reference
from astrai.extension import ops
from astrai.extension.loader import load
from test_ops_attention import HEAD_DIMS, OPTIONS, build_options, check, random_qkv, rng

pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 1.6e-2}


def on_cuda(value, dtype="float32"):
    """An array as a CUDA tensor, floats in the given dtype; anything else as it is."""
    import torch

    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value).cuda()
    return tensor.to(getattr(torch, dtype)) if value.dtype == np.float32 else tensor


def exact(tensor):
    """The exact values of a tensor, as float32."""
    return tensor.float().cpu().numpy()


def rows_of(batch, row, tensors):
    """Keys and values of one request of a PagedBatch, out of the given page tensors."""
    first, last = batch.kv_indptr[row], batch.kv_indptr[row + 1] - 1
    pages, length = batch.kv_indices[first:last], int(batch.kv_lens[row])
    return [exact(t)[pages].reshape(-1, *t.shape[2:])[None, :length] for t in tensors]


DENSE_SHAPES = [
    ("decode", 1, 1),
    ("decode", 1, 300),
    ("decode", 1, 700),
    ("prefill", 1, 300),
    ("prefill", 17, 33),
    ("prefill", 130, 200),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("phase", "q_len", "kv_len"), DENSE_SHAPES)
def test_dense(phase, name, q_len, kv_len, dtype):
    generator = rng(q_len * 1000 + kv_len)
    tensors = [on_cuda(a, dtype) for a in random_qkv(generator, 2, q_len, kv_len, 6, 2, 64)]
    options, seen_options = build_options(generator, OPTIONS[name], 2, q_len, kv_len, 6)
    seen = reference.visible_keys(2, q_len, kv_len, **seen_options)
    scores = {key: options[key] for key in ("softcap", "sinks", "scale") if key in options}
    expected = reference.attention(*map(exact, tensors), seen, **scores)
    options = {key: on_cuda(value) for key, value in options.items()}
    out, lse = getattr(ops, f"attn_{phase}")(*tensors, return_lse=True, **options)
    assert (out.shape, out.dtype) == (tensors[0].shape, tensors[0].dtype)
    assert out.device == lse.device == tensors[0].device
    check(exact(out), exact(lse), *expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", HEAD_DIMS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_strided_views_and_layouts(phase, width, dtype):
    import torch

    q_len = 1 if phase == "decode" else 37
    generator = rng(width)
    wide = torch.full((2, 120, 12, width + 8), float("nan"), device="cuda")
    wide[:, ::2, :, :width] = on_cuda(generator.standard_normal((2, 60, 12, width), np.float32))
    wide = wide.to(getattr(torch, dtype))
    # One fused buffer with gaps between tokens and between heads.
    q, k, v = (
        wide[:, : 2 * q_len : 2, :6, :width],
        *(wide[:, ::2, first : first + 2, :width] for first in (6, 10)),
    )
    seen = reference.visible_keys(2, q_len, 60, causal_offset=60 - q_len)
    expected = reference.attention(*map(exact, (q, k, v)), seen)
    run = getattr(ops, f"attn_{phase}")
    out, lse = run(q, k, v, causal_offset=60 - q_len, return_lse=True)
    check(exact(out), exact(lse), *expected, TOLERANCE[dtype])
    heads_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    out, lse = run(*heads_first, causal_offset=60 - q_len, return_lse=True, layout="bhld")
    check(exact(out.transpose(1, 2)), exact(lse), *expected, TOLERANCE[dtype])
    # Rows that start at no multiple of 16 bytes.
    shifted = [
        torch.zeros(t.numel() + 1, dtype=t.dtype, device="cuda")[1:].view(t.shape).copy_(t)
        for t in (q, k, v)
    ]
    out, lse = run(*shifted, causal_offset=60 - q_len, return_lse=True)
    check(exact(out), exact(lse), *expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 16, 5])
@pytest.mark.parametrize("heads", [(9, 3), (8, 1)])
def test_paged_decode(heads, page_size, dtype):
    generator = rng(page_size)
    lens = [1, 0, 37, 600, 16]
    batch = reference.PagedBatch(generator, lens, heads[1], 64, page_size)
    q = on_cuda(generator.standard_normal((5, heads[0], 64), np.float32), dtype)
    pages = [on_cuda(array, dtype) for array in (batch.k_pages, batch.v_pages)]
    lists = [on_cuda(array) for array in (batch.kv_indptr, batch.kv_indices, batch.kv_lens)]
    sinks = generator.standard_normal(heads[0]).astype(np.float32)
    parts = {
        name: on_cuda(np.full((6, heads[0], 8, last), np.nan, np.float32))
        for name, last in (("o_part", 64), ("ml_part", 2))
    }
    for options in (
        {},
        {"window": 20},
        {"softcap": 4.0, "sinks": sinks},
        {"num_splits": 3},
        {"fixed_split_keys": 128, "max_kv_len": 600},
        {"num_splits": 8, **parts},
        parts,
    ):
        given = {key: on_cuda(value) for key, value in options.items()}
        out, lse = ops.attn_paged_decode(q, *pages, *lists, return_lse=True, **given)
        for row, length in enumerate(lens):
            seen = reference.visible_keys(1, 1, length, window=options.get("window", -1))
            scores = {key: options[key] for key in ("softcap", "sinks") if key in options}
            keys, values = rows_of(batch, row, pages)
            expected = reference.attention(
                exact(q)[None, row : row + 1], keys, values, seen, **scores
            )
            got = exact(out)[None, row : row + 1], exact(lse)[None, row, :, None]
            check(*got, *expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("offset", [None, -1, 4, "tensor"])
def test_paged_prefill(offset, page_size, dtype):
    generator = rng(11)
    lens, q_lens = [20, 3, 0, 150, 7], [20, 1, 0, 99, 0]
    batch = reference.PagedBatch(generator, lens, 2, 64, page_size)
    indptr = np.cumsum([0, *q_lens]).astype(np.int32)
    q = on_cuda(generator.standard_normal((sum(q_lens), 6, 64), np.float32), dtype)
    per_request = np.array([0, 2, -1, 41, 0], np.int32)
    pages = [on_cuda(array, dtype) for array in (batch.k_pages, batch.v_pages)]
    lists = [on_cuda(a) for a in (indptr, batch.kv_indptr, batch.kv_indices, batch.kv_lens)]
    for options in ({}, {"window": 6}, {"softcap": 2.0}):
        out, lse = ops.attn_paged_prefill(
            q,
            *pages,
            *lists,
            causal_offset=on_cuda(per_request) if offset == "tensor" else offset,
            return_lse=True,
            **options,
        )
        for row, (kv_len, q_len) in enumerate(zip(lens, q_lens, strict=True)):
            rows = slice(indptr[row], indptr[row + 1])
            first = {None: kv_len - q_len, "tensor": int(per_request[row])}.get(offset, offset)
            seen = reference.visible_keys(
                1, q_len, kv_len, causal_offset=first, window=options.get("window", -1)
            )
            keys, values = rows_of(batch, row, pages)
            expected = reference.attention(
                exact(q)[None, rows], keys, values, seen, softcap=options.get("softcap", 0.0)
            )
            check(exact(out)[None, rows], exact(lse)[rows].T[None], *expected, TOLERANCE[dtype])


# ---- field cases ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_head_ratio_maps_to_its_group(phase, dtype):
    import torch

    ratios = [(28, 4), (24, 4), (15, 3), (9, 3), (64, 4), (8, 8), (8, 1)]
    for (heads, kv_heads), width, kv_len in itertools.product(ratios, HEAD_DIMS, (1, 5, 256, 1000)):
        kind = {"dtype": getattr(torch, dtype), "device": "cuda"}
        q = torch.randn(1, 1, heads, width, **kind)
        k = torch.zeros(1, kv_len, kv_heads, width, **kind)
        v = torch.arange(kv_heads, **kind)[:, None].expand(1, kv_len, kv_heads, width).contiguous()
        group = torch.arange(heads, device="cuda") // (heads // kv_heads)
        out = getattr(ops, f"attn_{phase}")(q, k, v)
        wanted = group[None, None, :, None].expand_as(out).to(out.dtype)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_rows_before_the_first_key_see_nothing():
    q = on_cuda(np.ones((4, 1, 32), np.float32))
    k_pages = on_cuda(np.zeros((1, 2, 1, 32), np.float32))
    v_pages = on_cuda(np.repeat(np.array([10, 20], np.float32), 32).reshape(1, 2, 1, 32))
    ints = [on_cuda(np.array(values, np.int32)) for values in ([0, 4], [0, 1], [0], [2])]
    out, lse = ops.attn_paged_prefill(q, k_pages, v_pages, *ints, return_lse=True)
    np.testing.assert_allclose(exact(out)[:, 0, 0], [0, 0, 10, 15])
    np.testing.assert_allclose(exact(lse)[:, 0], [-np.inf, -np.inf, 0, np.log(2)], atol=1e-6)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_low_scores_are_scores_and_masked_rows_are_empty(phase):
    entry = getattr(ops, f"attn_{phase}")
    q = np.zeros((1, 1, 1, 32), np.float32)
    k = q.copy()
    q[..., 0], k[..., 0] = 1.0, -100000.0
    v = np.full_like(k, 7.0)
    out, lse = entry(*map(on_cuda, (q, k, v)), scale=1.0, return_lse=True)
    np.testing.assert_array_equal(exact(out), v)
    np.testing.assert_allclose(exact(lse), -100000.0)
    two = [on_cuda(np.concatenate((array, array))) for array in (q, k, v)]
    mask = on_cuda(np.array([[False], [True]]))
    out, lse = entry(*two, mask=mask, scale=1.0, return_lse=True)
    np.testing.assert_array_equal(exact(out)[:, 0, 0, 0], [0, 7])
    np.testing.assert_array_equal(exact(lse)[:, 0, 0], [-np.inf, -100000.0])


def test_ragged_prefill_with_requests_without_queries():
    k_pages = on_cuda(np.zeros((3, 8, 3, 64), np.float32))
    v_pages = np.full((3, 8, 3, 64), np.nan, np.float32)
    for page, length in enumerate((4, 6, 2)):
        for head in range(3):
            v_pages[page, :length, head] = 100 * head + 1 + np.arange(length)[:, None]
    lists = [np.array(values, np.int32) for values in ([0, 1, 1, 2, 3], [0, 1, 2], [4, 0, 6, 2])]
    pages = (k_pages, on_cuda(v_pages))
    lists = [on_cuda(array) for array in lists]
    for q_lens, expected in (([1, 0, 1, 0], [2.5, 3.5]), ([2, 0, 1, 0], [2.0, 2.5, 3.5])):
        qo_indptr = on_cuda(np.cumsum([0, *q_lens]).astype(np.int32))
        q = on_cuda(np.ones((sum(q_lens), 9, 64), np.float32))
        out = ops.attn_paged_prefill(q, *pages, qo_indptr, *lists, scale=1.0)
        wanted = np.array(expected)[:, None] + 100 * (np.arange(9) // 3)
        np.testing.assert_allclose(exact(out), np.broadcast_to(wanted[..., None], out.shape))
    load().reset_counters()
    none = on_cuda(np.ones((0, 9, 64), np.float32))
    empty = ops.attn_paged_prefill(none, *pages, on_cuda(np.zeros(5, np.int32)), *lists)
    assert empty.shape == (0, 9, 64)
    assert load().counters()["launches"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 21, 63, 64, 65, 127, 129])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_padding_never_leaks(phase, length, dtype):
    """Valid rows are bitwise those of a run whose padding is zero; canaries survive."""

    def run(fill):
        generator = rng(length)
        pools = [np.full((5, 33, 1, 128), fill, np.float32) for _ in range(2)]
        count = -(-length // 33)
        pages = np.arange(5, dtype=np.int32)[::-1].copy()
        for pool in pools:
            rows = generator.standard_normal((length, 1, 128), np.float32)
            for token in range(length):
                pool[pages[token // 33], token % 33] = rows[token]
        q = np.full((length + 3, 16, 128), fill, np.float32)
        q[:length] = generator.standard_normal((length, 16, 128), np.float32)
        k_pages, v_pages, q = (on_cuda(array, dtype) for array in (*pools, q))
        out = q.new_full(q.shape, 123.0)
        lists = [np.array([0, count], np.int32), pages, np.array([length], np.int32)]
        lists = [on_cuda(array) for array in lists]
        if phase == "decode":
            rows = slice(length - 1, length)
            ops.attn_paged_decode(q[rows], k_pages, v_pages, *lists, out=out[rows])
        else:
            indptr = on_cuda(np.array([0, length], np.int32))
            ops.attn_paged_prefill(q[:length], k_pages, v_pages, indptr, *lists, out=out[:length])
        return exact(out)

    clean = run(0.0)
    for poison in (np.nan, np.inf):
        out = run(poison)
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out, clean)
        assert (out[length:] == 123.0).all()


# ---- scratch, splits --------------------------------------------------------------------------


def long_batch(dtype="bfloat16"):
    generator = rng(8)
    batch = reference.PagedBatch(generator, [3000, 5, 900], 2, 64, 16)
    q = on_cuda(generator.standard_normal((3, 8, 64), np.float32), dtype)
    pages = [on_cuda(array, dtype) for array in (batch.k_pages, batch.v_pages)]
    return q, pages, [on_cuda(a) for a in (batch.kv_indptr, batch.kv_indices, batch.kv_lens)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fixed_splits_do_not_depend_on_the_batch(dtype):
    q, pages, (indptr, indices, lens) = long_batch(dtype)
    options = {"fixed_split_keys": 256, "max_kv_len": 3000}
    together = ops.attn_paged_decode(q, *pages, indptr, indices, lens, **options)
    for row in range(3):
        alone = ops.attn_paged_decode(
            q[row : row + 1],
            *pages,
            indptr[row : row + 2],
            indices,
            lens[row : row + 1],
            **options,
        )
        assert alone.equal(together[row : row + 1])


def test_given_partials_spare_the_allocation():
    import torch

    q, pages, lists = long_batch()
    expected = ops.attn_paged_decode(q, *pages, *lists)
    o_part = torch.full((3, 8, 64, 64), float("nan"), device="cuda")
    ml_part = torch.full((3, 8, 64, 2), float("nan"), device="cuda")
    load().reset_counters()
    out = ops.attn_paged_decode(q, *pages, *lists, o_part=o_part, ml_part=ml_part)
    assert load().counters()["device_allocations"] == 0
    assert load().counters()["synchronizations"] == 0
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="num_splits is 65; expected at most the 64 that o_part"):
        ops.attn_paged_decode(q, *pages, *lists, o_part=o_part, ml_part=ml_part, num_splits=65)


def test_matching_decode_is_left_to_the_cpu():
    q, k, v = (on_cuda(part) for part in random_qkv(rng(), 1, 4, 9, 2, 1, 32))
    with pytest.raises(ValueError, match="match_decode is true for tensors on cuda:0; expected"):
        ops.attn_prefill(q, k, v, match_decode=True)
