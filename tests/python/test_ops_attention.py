"""The four attention kernels against float64, through numpy and torch tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

import attention_reference as reference
from astrai.extension import ops
from astrai.extension.loader import load

HEAD_DIMS = load().attn_head_dims()
ISAS = load().supported_isas()
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture(params=ISAS)
def isa(request) -> Iterator[str]:
    """Every instruction set that this machine can run."""
    before = load().cpu_isa()
    load().force_isa(request.param)
    yield request.param
    load().force_isa(before)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_qkv(generator, batch, q_len, kv_len, heads, kv_heads, width):
    def normal(*shape):
        return generator.standard_normal(shape, np.float32)

    return (
        normal(batch, q_len, heads, width),
        normal(batch, kv_len, kv_heads, width),
        normal(batch, kv_len, kv_heads, width),
    )


def as_dtype(array, dtype):
    """The array as a torch tensor of that dtype, and its exact values as float32."""
    import torch

    tensor = torch.from_numpy(array).to(getattr(torch, dtype))
    return tensor, tensor.float().numpy()


def check(out, lse, expected, expected_lse, tolerance):
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    if lse is not None:
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
        seen = np.isfinite(expected_lse)
        np.testing.assert_allclose(
            np.asarray(lse)[seen], expected_lse[seen], rtol=tolerance, atol=tolerance
        )


OPTIONS = {
    "full": {},
    "causal": {"causal_offset": "end"},
    "causal_start": {"causal_offset": 0},
    "window": {"causal_offset": "end", "window": 5},
    "window_full": {"window": 7},
    "softcap": {"causal_offset": "end", "softcap": 3.0},
    "sinks": {"causal_offset": "end", "sinks": True},
    "mask_keys": {"mask": "keys"},
    "mask_rows": {"mask": "rows", "causal_offset": "end"},
    "scale": {"scale": 0.3},
    "all": {"causal_offset": "end", "window": 9, "softcap": 5.0, "sinks": True, "mask": "rows"},
}


def build_options(generator, options, batch, q_len, kv_len, heads):
    """(keyword arguments of the op, keyword arguments of visible_keys)."""
    options = dict(options)
    if options.get("causal_offset") == "end":
        options["causal_offset"] = kv_len - q_len
    if options.get("sinks"):
        options["sinks"] = generator.standard_normal(heads).astype(np.float32)
    kind = options.pop("mask", None)
    if kind == "keys":
        options["mask"] = generator.random((batch, kv_len)) < 0.6
    elif kind == "rows":
        options["mask"] = generator.random((batch, q_len, kv_len)) < 0.6
        options["mask"][0, 0] = False
    seen = {name: options[name] for name in ("mask", "causal_offset", "window") if name in options}
    return options, seen


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 300), (1, 700), (17, 33), (33, 33)])
def test_dense_options(isa, name, q_len, kv_len):
    generator = rng(q_len * 1000 + kv_len)
    q, k, v = random_qkv(generator, 2, q_len, kv_len, 6, 2, 64)
    options, seen_options = build_options(generator, OPTIONS[name], 2, q_len, kv_len, 6)
    seen = reference.visible_keys(2, q_len, kv_len, **seen_options)
    scores = {key: options[key] for key in ("softcap", "sinks", "scale") if key in options}
    expected = reference.attention(q, k, v, seen, **scores)
    entries = [ops.attn_prefill] + ([ops.attn_decode] if q_len == 1 else [])
    for entry in entries:
        out, lse = entry(q, k, v, return_lse=True, **options)
        assert out.shape == q.shape
        assert lse.shape == (2, 6, q_len)
        check(out, lse, *expected, TOLERANCE["float32"])
        np.testing.assert_array_equal(entry(q, k, v, **options), out)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", HEAD_DIMS)
def test_dense_head_dims_and_dtypes(isa, width, dtype):
    arrays = random_qkv(rng(width), 2, 9, 40, 4, 2, width)
    tensors, exact = zip(*(as_dtype(array, dtype) for array in arrays), strict=True)
    seen = reference.visible_keys(2, 9, 40, causal_offset=31)
    expected = reference.attention(*exact, seen)
    out, lse = ops.attn_prefill(*tensors, causal_offset=31, return_lse=True)
    assert out.dtype == tensors[0].dtype
    check(out.float(), lse.numpy(), *expected, TOLERANCE[dtype])
    out, lse = ops.attn_decode(tensors[0][:, -1:], *tensors[1:], return_lse=True)
    check(out.float(), lse.numpy(), expected[0][:, -1:], expected[1][..., -1:], TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(28, 4), (15, 3), (9, 3), (64, 4), (8, 8), (8, 1), (14, 2)])
def test_every_head_ratio_maps_to_its_group(heads):
    num_heads, num_kv_heads = heads
    for width, kv_len in itertools.product((32, 80), (1, 5, 300)):
        q = rng(1).standard_normal((2, 1, num_heads, width), np.float32)
        k = np.zeros((2, kv_len, num_kv_heads, width), np.float32)
        v = np.broadcast_to(np.arange(num_kv_heads, dtype=np.float32)[:, None], k.shape).copy()
        group = np.arange(num_heads) // (num_heads // num_kv_heads)
        for entry in (ops.attn_decode, ops.attn_prefill):
            out = entry(q, k, v)
            np.testing.assert_allclose(
                out, np.broadcast_to(group[None, None, :, None], out.shape), rtol=1e-6
            )


@pytest.mark.parametrize("entry", ["attn_decode", "attn_prefill"])
def test_layouts_and_strides_are_views(entry):
    q_len = 1 if entry == "attn_decode" else 7
    q, k, v = random_qkv(rng(3), 2, q_len, 30, 4, 2, 32)
    run = getattr(ops, entry)
    expected, expected_lse = run(q, k, v, causal_offset=23, return_lse=True)
    swapped = [np.ascontiguousarray(tensor.swapaxes(1, 2)) for tensor in (q, k, v)]
    out, lse = run(*swapped, causal_offset=23, return_lse=True, layout="bhld")
    np.testing.assert_array_equal(out.swapaxes(1, 2), expected)
    np.testing.assert_array_equal(lse, expected_lse)
    given = np.full(swapped[0].shape, np.nan, np.float32)
    assert run(*swapped, causal_offset=23, layout="bhld", out=given) is given
    np.testing.assert_array_equal(given, out)
    # One fused buffer, reversed batch, gaps between tokens.
    wide = np.full((2, 60, 8, 48), np.nan, np.float32)
    wide[:, ::2, :2, :32], wide[:, ::2, 4:6, :32] = k[::-1], v[::-1]
    views = wide[::-1, ::2, :2, :32], wide[::-1, ::2, 4:6, :32]
    np.testing.assert_array_equal(run(q, *views, causal_offset=23), expected)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("page_size", [1, 16, 5])
def test_paged_decode(isa, page_size, dtype):
    generator = rng(page_size)
    lens = [1, 0, 37, 600, 16]
    batch = reference.PagedBatch(generator, lens, 3, 64, page_size)
    q, q_exact = as_dtype(generator.standard_normal((5, 9, 64), np.float32), dtype)
    k_pages, k_exact = as_dtype(batch.k_pages, dtype)
    v_pages, v_exact = as_dtype(batch.v_pages, dtype)
    sinks = generator.standard_normal(9).astype(np.float32)
    for options in ({}, {"window": 20}, {"softcap": 4.0, "sinks": sinks}, {"num_splits": 3}):
        out, lse = ops.attn_paged_decode(
            q,
            k_pages,
            v_pages,
            batch.kv_indptr,
            batch.kv_indices,
            batch.kv_lens,
            return_lse=True,
            **options,
        )
        assert out.shape == q.shape
        assert lse.shape == (5, 9)
        for row, length in enumerate(lens):
            pages = batch.kv_indices[batch.kv_indptr[row] : batch.kv_indptr[row + 1] - 1]
            keys, values = (
                exact[pages].reshape(-1, 3, 64)[:length] for exact in (k_exact, v_exact)
            )
            seen = reference.visible_keys(1, 1, length, window=options.get("window", -1))
            scores = {key: options[key] for key in ("softcap", "sinks") if key in options}
            expected = reference.attention(
                q_exact[None, row : row + 1], keys[None], values[None], seen, **scores
            )
            check(
                out[None, row : row + 1].float(),
                lse[None, row, :, None].numpy(),
                *expected,
                TOLERANCE[dtype],
            )


def test_paged_decode_uses_given_partials():
    generator = rng(4)
    batch = reference.PagedBatch(generator, [900, 3], 2, 32, 16)
    q = generator.standard_normal((2, 4, 32), np.float32)
    pages = (batch.k_pages, batch.v_pages, batch.kv_indptr, batch.kv_indices, batch.kv_lens)
    expected = ops.attn_paged_decode(q, *pages)
    o_part = np.full((2, 4, 8, 32), np.nan, np.float32)
    ml_part = np.full((2, 4, 8, 2), np.nan, np.float32)
    for splits in (0, 1, 2, 8):
        out = ops.attn_paged_decode(q, *pages, o_part=o_part, ml_part=ml_part, num_splits=splits)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="num_splits"):
        ops.attn_paged_decode(q, *pages, o_part=o_part, ml_part=ml_part, num_splits=9)
    with pytest.raises(ValueError, match="ml_part"):
        ops.attn_paged_decode(q, *pages, o_part=o_part)


def test_fixed_splits_do_not_depend_on_the_batch():
    generator = rng(6)
    batch = reference.PagedBatch(generator, [700, 3, 1500], 2, 32, 16)
    q = generator.standard_normal((3, 4, 32), np.float32)
    pages = (batch.k_pages, batch.v_pages)
    options = {"fixed_split_keys": 256, "max_kv_len": 1500}
    lists = (batch.kv_indptr, batch.kv_indices, batch.kv_lens)
    together = ops.attn_paged_decode(q, *pages, *lists, **options)
    alone = ops.attn_paged_decode(
        q[:1], *pages, batch.kv_indptr[:2], batch.kv_indices, batch.kv_lens[:1], **options
    )
    np.testing.assert_array_equal(alone, together[:1])
    np.testing.assert_allclose(together, ops.attn_paged_decode(q, *pages, *lists), rtol=1e-5)
    q, k, v = random_qkv(generator, 2, 1, 600, 4, 2, 32)
    np.testing.assert_array_equal(
        ops.attn_decode(q, k, v, **options)[:1], ops.attn_decode(q[:1], k[:1], v[:1], **options)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed_split_keys": 100}, "fixed_split_keys is 100; expected 0 or a multiple of 128"),
        ({"fixed_split_keys": -128}, "fixed_split_keys is -128; expected 0 or a multiple of 128"),
        ({"fixed_split_keys": 128, "num_splits": 2}, "num_splits is 2; expected 0, since fixed_sp"),
        ({"max_kv_len": -1}, "max_kv_len is -1; expected at least 1, or 0 for unknown"),
    ],
)
def test_bad_splits(options, message):
    arguments = paged_arguments()
    with pytest.raises(ValueError, match="attn_paged_decode: " + message):
        ops.attn_paged_decode(**arguments, **options)
    q, k, v = random_qkv(rng(), 1, 1, 5, 4, 2, 32)
    with pytest.raises(ValueError, match="attn_decode: " + message):
        ops.attn_decode(q, k, v, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("offset", [None, -1, 4, "tensor"])
def test_paged_prefill(isa, page_size, offset):
    generator = rng(11)
    lens, q_lens = [20, 3, 0, 50, 7], [20, 1, 0, 9, 0]
    batch = reference.PagedBatch(generator, lens, 2, 32, page_size)
    indptr = np.cumsum([0, *q_lens]).astype(np.int32)
    q = generator.standard_normal((sum(q_lens), 6, 32), np.float32)
    per_request = np.array([0, 2, -1, 41, 0], np.int32)
    for options in ({}, {"window": 6}, {"softcap": 2.0}):
        out, lse = ops.attn_paged_prefill(
            q,
            batch.k_pages,
            batch.v_pages,
            indptr,
            batch.kv_indptr,
            batch.kv_indices,
            batch.kv_lens,
            causal_offset=per_request if offset == "tensor" else offset,
            return_lse=True,
            **options,
        )
        assert lse.shape == (30, 6)
        for row, (kv_len, q_len) in enumerate(zip(lens, q_lens, strict=True)):
            rows = slice(indptr[row], indptr[row + 1])
            first = {None: kv_len - q_len, "tensor": int(per_request[row])}.get(offset, offset)
            seen = reference.visible_keys(
                1, q_len, kv_len, causal_offset=first, window=options.get("window", -1)
            )
            expected = reference.attention(
                q[None, rows],
                batch.keys[row][None],
                batch.values[row][None],
                seen,
                softcap=options.get("softcap", 0.0),
            )
            check(out[None, rows], lse[rows].T[None], *expected, TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_prefill_that_matches_decode_gives_its_bits(isa, page_size, dtype):
    generator = rng(page_size)
    kv_lens, q_lens = [700, 3, 41], [600, 3, 17]
    batch = reference.PagedBatch(generator, kv_lens, 2, 64, page_size)
    q, _ = as_dtype(generator.standard_normal((sum(q_lens), 6, 64), np.float32), dtype)
    pages = tuple(as_dtype(rows, dtype)[0] for rows in (batch.k_pages, batch.v_pages))
    sinks = generator.standard_normal(6).astype(np.float32)
    qo_indptr = np.cumsum([0, *q_lens]).astype(np.int32)
    places = [(0, 0), (0, 311), (0, 599), (1, 0), (1, 2), (2, 5), (2, 16)]
    for options in ({}, {"window": 20}, {"softcap": 4.0, "sinks": sinks}):
        lists = (batch.kv_indptr, batch.kv_indices, batch.kv_lens)
        out, lse = ops.attn_paged_prefill(
            q, *pages, qo_indptr, *lists, match_decode=True, return_lse=True, **options
        )
        for request, token in places:
            row = int(qo_indptr[request]) + token
            seen = np.array([kv_lens[request] - q_lens[request] + token + 1], np.int32)
            indptr = batch.kv_indptr[request : request + 2]
            one, one_lse = ops.attn_paged_decode(
                q[row : row + 1], *pages, indptr, batch.kv_indices, seen, return_lse=True, **options
            )
            assert bool((out[row : row + 1] == one).all()), (request, token, options)
            assert bool((lse[row] == one_lse[0]).all())
        # As numbers it is the same attention as without.
        tiled = ops.attn_paged_prefill(q, *pages, qo_indptr, *lists, **options)
        np.testing.assert_allclose(out.float(), tiled.float(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dense_prefill_that_matches_decode_gives_its_bits(isa, head_dim):
    q, k, v = random_qkv(rng(head_dim), 2, 9, 300, 4, 2, head_dim)
    out = ops.attn_prefill(q, k, v, causal_offset=150, match_decode=True)
    for row in range(9):
        keys = slice(0, 150 + row + 1)
        one = ops.attn_decode(q[:, row : row + 1], k[:, keys], v[:, keys])
        np.testing.assert_array_equal(out[:, row : row + 1], one)


def test_rows_before_the_first_key_see_nothing():
    q = np.ones((4, 1, 32), np.float32)
    k_pages = np.zeros((1, 2, 1, 32), np.float32)
    v_pages = np.repeat(np.array([10, 20], np.float32), 32).reshape(k_pages.shape)
    ints = [np.array(values, np.int32) for values in ([0, 4], [0, 1], [0], [2])]
    out, lse = ops.attn_paged_prefill(q, k_pages, v_pages, *ints, return_lse=True)
    np.testing.assert_allclose(out[:, 0, 0], [0, 0, 10, 15])
    np.testing.assert_allclose(lse[:, 0], [-np.inf, -np.inf, 0, np.log(2)], atol=1e-6)


def test_very_low_scores_are_scores():
    q = np.zeros((1, 1, 1, 32), np.float32)
    k = q.copy()
    q[..., 0], k[..., 0] = 1.0, -100000.0
    v = np.full_like(k, 7.0)
    for entry in (ops.attn_decode, ops.attn_prefill):
        out, lse = entry(q, k, v, scale=1.0, return_lse=True)
        np.testing.assert_array_equal(out, v)
        np.testing.assert_allclose(lse, -100000.0)


def test_ragged_batch_with_requests_without_queries():
    page_of = np.array([0, 1, 2], np.int32)
    k_pages = np.zeros((3, 8, 3, 64), np.float32)
    v_pages = np.full((3, 8, 3, 64), np.nan, np.float32)
    lens = np.array([4, 0, 6, 2], np.int32)
    kv_indptr = np.array([0, 1, 1, 2, 3], np.int32)
    for page, length in zip(page_of, (4, 6, 2), strict=True):
        for head in range(3):
            v_pages[page, :length, head] = 100 * head + 1 + np.arange(length)[:, None]
    for q_lens, expected in (([1, 0, 1, 0], [2.5, 3.5]), ([2, 0, 1, 0], [2.0, 2.5, 3.5])):
        qo_indptr = np.cumsum([0, *q_lens]).astype(np.int32)
        q = np.ones((sum(q_lens), 9, 64), np.float32)
        out = ops.attn_paged_prefill(
            q, k_pages, v_pages, qo_indptr, kv_indptr, page_of, lens, scale=1.0
        )
        wanted = np.array(expected)[:, None] + 100 * (np.arange(9) // 3)
        np.testing.assert_allclose(out, np.broadcast_to(wanted[..., None], out.shape))
    empty = ops.attn_paged_prefill(
        np.ones((0, 9, 64), np.float32),
        k_pages,
        v_pages,
        np.zeros(5, np.int32),
        kv_indptr,
        page_of,
        lens,
    )
    assert empty.shape == (0, 9, 64)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 129])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_padding_never_leaks(length, poison):
    """Valid rows are bitwise those of a run whose padding is zero; canaries survive."""

    def run(fill):
        generator = rng(length)
        k_pages, v_pages = (np.full((5, 33, 1, 128), fill, np.float32) for _ in range(2))
        count = -(-length // 33)
        pages = np.arange(5, dtype=np.int32)[::-1].copy()
        for pool in (k_pages, v_pages):
            rows = generator.standard_normal((length, 1, 128), np.float32)
            for token in range(length):
                pool[pages[token // 33], token % 33] = rows[token]
        q = np.full((length + 3, 16, 128), fill, np.float32)
        q[:length] = generator.standard_normal((length, 16, 128), np.float32)
        out = np.full((length + 3, 16, 128), 123.0, np.float32)
        args = (np.array([0, count], np.int32), pages, np.array([length], np.int32))
        qo_indptr = np.array([0, length], np.int32)
        ops.attn_paged_prefill(q[:length], k_pages, v_pages, qo_indptr, *args, out=out[:length])
        decoded = ops.attn_paged_decode(q[length - 1 : length], k_pages, v_pages, *args)
        return out, decoded

    out, decoded = run(poison)
    clean, clean_decoded = run(0.0)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out, clean)
    np.testing.assert_array_equal(decoded, clean_decoded)
    assert (out[length:] == 123.0).all()


def paged_arguments():
    batch = reference.PagedBatch(rng(), [5, 9], 2, 32, 4)
    q = rng(1).standard_normal((2, 4, 32), np.float32)
    return {
        "q": q,
        "k_pages": batch.k_pages,
        "v_pages": batch.v_pages,
        "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices,
        "kv_lens": batch.kv_lens,
        "out": np.full_like(q, 123.0),
    }


def wrong_page(arguments):
    indices = arguments["kv_indices"].copy()
    indices[0] = arguments["k_pages"].shape[0]
    return indices


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": lambda a: a["q"][:, :3]}, "heads"),
        ({"q": lambda a: a["q"][:, :, :30]}, "head_dim|shape"),
        ({"q": lambda a: a["q"].astype(np.float64)}, "float64"),
        ({"q": lambda a: a["q"].astype(np.float16)}, "float16"),
        ({"q": lambda a: a["q"][:1]}, "expected"),
        ({"q": lambda a: np.repeat(a["q"], 2, 2)[:, :, ::2]}, "stride"),
        ({"k_pages": lambda a: a["k_pages"][:, :, :, :16]}, "head_dim|shape|dimension"),
        ({"v_pages": lambda a: a["v_pages"][1:]}, "v_pages"),
        ({"kv_indptr": lambda a: a["kv_indptr"][:2]}, "kv_indptr"),
        ({"kv_indptr": lambda a: a["kv_indptr"].astype(np.int64)}, "int64"),
        ({"kv_indptr": lambda a: a["kv_indptr"][::-1].copy()}, "kv_indptr"),
        ({"kv_indices": wrong_page}, "kv_indices"),
        ({"kv_indices": lambda a: a["kv_indices"][:3]}, "kv_indices|kv_indptr"),
        ({"kv_lens": lambda a: -a["kv_lens"]}, "kv_lens"),
        ({"kv_lens": lambda a: a["kv_lens"] + 100}, "kv_lens"),
        ({"mask": lambda a: np.ones((2, 9), np.float32)}, "mask"),
        ({"mask": lambda a: np.ones((3, 9), bool)}, "mask"),
        ({"window": lambda a: 0}, "window"),
        ({"softcap": lambda a: -1.0}, "softcap"),
        ({"softcap": lambda a: float("nan")}, "softcap"),
        ({"scale": lambda a: float("inf")}, "scale"),
        ({"sinks": lambda a: np.ones(3, np.float32)}, "sinks"),
        ({"num_splits": lambda a: -1}, "num_splits"),
        ({"out": lambda a: a["out"][:, :2]}, "out"),
        ({"out": lambda a: a["out"].astype(np.float16)}, "out"),
    ],
)
def test_bad_paged_arguments_leave_outputs_alone(changed, message):
    arguments = paged_arguments()
    canary = arguments["out"]
    for name, make in changed.items():
        arguments[name] = make(arguments)
    with pytest.raises(ValueError, match=message) as caught:
        ops.attn_paged_decode(**arguments)
    assert str(caught.value).startswith("attn_paged_decode: ")
    assert "expected" in str(caught.value)
    assert (canary == 123.0).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layout": "lbhd"}, "layout 'lbhd'; expected 'blhd' or 'bhld'"),
        ({"causal_offset": -2}, "causal_offset"),
        ({"q": np.zeros((1, 2, 4, 32), np.float32)}, "q"),
        ({"q": np.zeros((1, 4, 32), np.float32)}, "q has shape"),
        ({"q": np.zeros((1, 1, 4, 48), np.float32), "k": None}, "head_dim"),
        ({"mask": np.ones((1, 4), bool)}, "mask"),
        ({"v": np.zeros((1, 4, 2, 32), np.float32)}, "v"),
    ],
)
def test_bad_dense_arguments(changed, message):
    arguments = dict(zip("qkv", random_qkv(rng(), 1, 1, 5, 4, 2, 32), strict=True)) | changed
    if arguments["k"] is None:  # a head dim that is not compiled, consistently
        arguments["k"] = arguments["v"] = np.zeros((1, 5, 2, 48), np.float32)
    with pytest.raises(ValueError, match=message) as caught:
        ops.attn_decode(**arguments)
    assert str(caught.value).startswith("attn_decode: ")


def test_layout_names_wrong_rank():
    q, k, v = random_qkv(rng(), 1, 1, 5, 4, 2, 32)
    with pytest.raises(ValueError, match=r"attn_decode: k has shape \[5, 2, 32\]"):
        ops.attn_decode(q.swapaxes(1, 2), k[0], v, layout="bhld")
