"""Every backend that runs here, over one grid of options, against float64; dense and paged."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

import attention_reference as reference

ON_CPU = [("cpu", "cpu"), ("torch_native", "cpu")]
ON_CUDA = [("cuda", "cuda"), ("torch_native", "cuda")]
PLACES = [*ON_CPU, *(pytest.param(place, marks=pytest.mark.gpu) for place in ON_CUDA)]
TOLERANCE = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2.5e-2}


class Shape(NamedTuple):
    num_layers: int = 2
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden_size: int = 64
    vocab_size: int = 50


@pytest.fixture(params=PLACES, ids="-on-".join)
def place(request):
    """(backend, device)"""
    return request.param


@pytest.fixture
def backend(place):
    from astrai.attention import _BACKEND_REGISTRY, ATTN_BACKEND

    return _BACKEND_REGISTRY[ATTN_BACKEND(place[0])]()


@pytest.fixture
def device(place):
    return place[1]


def to_torch(array, dtype="float32", device="cpu"):
    import torch

    return torch.from_numpy(array).to(device, getattr(torch, dtype))


def to_numpy(tensor):
    return tensor.float().cpu().numpy()


OPTIONS = {
    "full": {},
    "causal": {"causal_offset": "end"},
    "causal_start": {"causal_offset": 0},
    "causal_far": {"causal_offset": 1000},
    "window": {"causal_offset": "end", "window": 5},
    "window_of_one": {"causal_offset": "end", "window": 1},
    "window_full": {"window": 7},
    "softcap": {"causal_offset": "end", "softcap": 3.0},
    "sinks": {"causal_offset": "end", "sinks": True},
    "mask_keys": {"mask": "keys"},
    "mask_rows": {"mask": "rows", "causal_offset": "end"},
    "mask_rows_sinks": {"mask": "rows", "sinks": True},
    "scale": {"scale": 0.3},
    "all": {"causal_offset": "end", "window": 9, "softcap": 5.0, "sinks": True, "mask": "rows"},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 40), (7, 19), (19, 19), (9, 4)])
@pytest.mark.parametrize(("heads", "dtype"), [((6, 2), "float32"), ((5, 1), "bfloat16")])
def test_dense(backend, device, name, q_len, kv_len, heads, dtype):
    generator = np.random.default_rng(q_len * 100 + kv_len)
    shapes = [(2, q_len, heads[0], 32), (2, kv_len, heads[1], 32), (2, kv_len, heads[1], 32)]
    q, k, v = (to_torch(generator.standard_normal(s, np.float32), dtype, device) for s in shapes)
    options = dict(OPTIONS[name])
    if options.get("causal_offset") == "end":
        options["causal_offset"] = max(kv_len - q_len, 0)
    seen_options = {key: options[key] for key in ("causal_offset", "window") if key in options}
    mask = options.pop("mask", None)
    if mask is not None:
        shape = (2, kv_len) if mask == "keys" else (2, q_len, kv_len)
        seen_options["mask"] = generator.random(shape) < 0.6
        if mask == "rows":
            seen_options["mask"][1, 0] = False
        options["mask"] = to_torch(seen_options["mask"], "bool", device)
    scores = {key: options[key] for key in ("softcap", "scale") if key in options}
    if options.pop("sinks", False):
        scores["sinks"] = generator.standard_normal(heads[0]).astype(np.float32)
        options["sinks"] = to_torch(scores["sinks"], device=device)
    seen = reference.visible_keys(2, q_len, kv_len, **seen_options)
    expected, _ = reference.attention(*map(to_numpy, (q, k, v)), seen, **scores)
    for entry in (backend.fwd_prefill, backend.fwd_decode)[: 2 if q_len == 1 else 1]:
        out = entry(q, k, v, **options)
        assert out.dtype == q.dtype
        np.testing.assert_allclose(
            to_numpy(out), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


def test_dense_keys_that_nobody_sees_may_hold_anything(backend, device):
    def run(*arrays, **options):
        tensors = [to_torch(array, device=device) for array in arrays]
        return to_numpy(backend.fwd_prefill(*tensors, causal_offset=0, **options))

    generator = np.random.default_rng(5)
    q, k, v = (generator.standard_normal((1, 3, 2, 32), np.float32) for _ in range(3))
    wide_k, wide_v = (np.full((1, 8, 2, 32), np.nan, np.float32) for _ in range(2))
    wide_k[:, :3], wide_v[:, :3] = k, v
    plain = run(q, k, v)
    np.testing.assert_allclose(run(q, wide_k, wide_v), plain, rtol=1e-6, atol=1e-7)
    mask = to_torch(np.arange(8)[None] < 3, "bool", device)
    np.testing.assert_allclose(run(q, wide_k, wide_v, mask=mask), plain, rtol=1e-5, atol=1e-6)


# ---- paged ------------------------------------------------------------------------------------


def make_cache(page_size=4, dtype="float32", device="cpu", **changes):
    import torch

    from astrai.kv_cache import KVCache

    sizes = {"max_batch": 8, "max_context": 128, "max_step_tokens": 64} | changes
    kv = KVCache(Shape(), 120, page_size, getattr(torch, dtype), device, **sizes)
    kv.storage.fill_(float("nan"))
    return kv


def run_step(backend, kv, tasks, q_lens, generator, history, options, dtype, pad_to=0):
    """One step of random rows on layer 1; checks every real row and returns the output."""
    for task, count in zip(tasks, q_lens, strict=True):
        assert kv.pool.try_reserve(task, count)
    step = kv.bind(tasks, q_lens, pad_to=pad_to)
    total = step.num_row_tokens
    q, k, v = (
        to_torch(generator.standard_normal((total, heads, 32), np.float32), dtype, kv.device)
        for heads in (6, 2, 2)
    )
    entry = backend.fwd_decode if step.phase == "decode" else backend.fwd_prefill
    out = entry(q, k, v, kv=kv, layer_id=1, **options)
    assert out.shape == q.shape
    q, k, v, out = (tensor.cpu() for tensor in (q, k, v, out))
    sinks = options.get("sinks")
    row = 0
    for task, count in zip(tasks, q_lens, strict=True):
        rows = slice(row, row + count)
        row += count
        keys, values = history.setdefault(task, ([], []))
        keys.append(k[rows].float().numpy())
        values.append(v[rows].float().numpy())
        all_k, all_v = np.concatenate(keys)[None], np.concatenate(values)[None]
        length = all_k.shape[1]
        seen = reference.visible_keys(
            1, count, length, causal_offset=length - count, window=options.get("window", -1)
        )
        expected, _ = reference.attention(
            q[None, rows].float().numpy(),
            all_k,
            all_v,
            seen,
            softcap=options.get("softcap", 0.0),
            sinks=None if sinks is None else sinks.cpu().numpy(),
            scale=options.get("scale"),
        )
        np.testing.assert_allclose(
            out[None, rows].float().numpy(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        kv.pool.append(task, count)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", ["plain", "window", "everything"])
def test_paged_steps(backend, device, page_size, name, dtype):
    """Prefill, chunks beside decodes, decodes, a fork that diverges; unused slots are NaN."""
    check_paged_steps(backend, make_cache(page_size, dtype, device), name, dtype)


@pytest.mark.parametrize("place", ON_CPU, ids="-on-".join)
@pytest.mark.parametrize("by_kernel", [False, True])
def test_the_path_of_other_devices_on_this_ones_memory(backend, by_kernel):
    """Binding, page copies and partials as for a device; torch writes where there is no kernel."""
    kv = make_cache()
    kv._on_cpu, kv._writes_by_kernel = False, by_kernel
    check_paged_steps(backend, kv, "everything", "float32")


def test_a_small_batch_sees_the_partials_of_the_full_one_as_more_splits():
    kv = make_cache(max_batch=8, max_context=1024)
    o_part, ml_part = kv.workspace.o_part, kv.workspace.ml_part
    assert o_part.shape == (8, 6, 4, 32)
    kv._on_cpu = False
    for rows, splits in ((8, 4), (5, 6), (1, 32)):
        cut_o, cut_ml = kv._partials_for(rows)
        assert cut_o.shape == (rows, 6, splits, 32)
        assert cut_ml.shape == (rows, 6, splits, 2)
        assert cut_o.is_contiguous()
        assert cut_o.data_ptr() == o_part.data_ptr()
        assert cut_ml.data_ptr() == ml_part.data_ptr()
        assert kv._partials_for(rows)[0] is cut_o


def test_a_padded_step_of_a_device_has_the_sizes_of_every_step():
    kv = make_cache()
    kv._on_cpu = False
    kv.pool.add_task(1)
    for length in (3, 60):
        assert kv.pool.try_reserve(1, length)
        step = kv.bind([1], [length], pad_to=4)
        assert step.kv_indices.shape == (4 * 32,)
        assert step.kv_indices.data_ptr() == kv.workspace.kv_indices.data_ptr()
        kv.pool.append(1, length)


def check_paged_steps(backend, kv, name, dtype):
    options = {"plain": {}, "window": {"window": 6}}.get(name)
    if options is None:
        sinks = to_torch(np.linspace(-1, 1, 6).astype(np.float32)).to(kv.device)
        options = {"window": 11, "softcap": 4.0, "scale": 0.2, "sinks": sinks}
    generator = np.random.default_rng(kv.page_size)
    history: dict = {}

    def step(tasks, q_lens):
        run_step(backend, kv, tasks, q_lens, generator, history, options, dtype)

    for task in (10, 11, 12):
        kv.pool.add_task(task)
    step([10, 11], [5, 17])
    step([11, 12, 10], [1, 9, 1])
    step([10, 11, 12], [1, 1, 1])
    kv.pool.fork(11, 13)
    history[13] = tuple(list(part) for part in history[11])
    step([11, 13, 12], [1, 1, 1])
    step([13, 11], [2, 1])
    kv.pool.check_integrity()


def test_padding_requests_write_nowhere_and_give_zeros(backend, device):
    kv = make_cache(device=device)
    kv.pool.add_task(1)
    generator, history = np.random.default_rng(0), {}
    run_step(backend, kv, [1], [3], generator, history, {}, "float32")
    before = kv.storage.clone()
    out = run_step(backend, kv, [1], [1], generator, history, {}, "float32", pad_to=4)
    assert kv.step.num_rows == 4
    assert not out[1:].any()
    changed = (before.nan_to_num(9.0) != kv.storage.nan_to_num(9.0)).flatten(4).any(-1)
    assert changed[:, 1].sum() == 2  # one slot of K, one of V
    assert not changed[:, 0].any()


def test_steady_decode_allocates_nothing_in_the_runtime():
    from astrai.attention import CpuBackend
    from astrai.extension.loader import load

    kv, history, generator = make_cache(), {}, np.random.default_rng(0)
    tasks = [1, 2, 3]
    for task in tasks:
        kv.pool.add_task(task)

    def step(q_lens):
        run_step(CpuBackend(), kv, tasks, q_lens, generator, history, {}, "float32")

    step([20, 3, 9])
    step([1, 1, 1])
    load().reset_counters()
    for _ in range(20):
        step([1, 1, 1])
    counted = load().counters()
    assert counted["host_allocations"] == counted["device_allocations"] == 0
    assert counted["synchronizations"] == 0
    assert counted["launches"] == 2 * 20  # one write, one attention


def test_paged_mask_hides_keys(backend, device):
    kv = make_cache(device=device)
    kv.pool.add_task(1)
    generator = np.random.default_rng(3)
    run_step(backend, kv, [1], [9], generator, {}, {}, "float32")
    assert kv.pool.try_reserve(1, 1)
    kv.bind([1], [1])
    q, k, v = (
        to_torch(generator.standard_normal((1, heads, 32), np.float32), device=device)
        for heads in (6, 2, 2)
    )
    only_last = to_torch(np.arange(10)[None] == 9, "bool", device)
    out = backend.fwd_decode(q, k, v, kv=kv, layer_id=1, mask=only_last)
    np.testing.assert_allclose(to_numpy(out), to_numpy(v.repeat_interleave(3, dim=1)), rtol=1e-6)


def test_paged_calls_take_positions_from_the_cache(backend, device):
    kv = make_cache(device=device)
    kv.pool.add_task(1)
    assert kv.pool.try_reserve(1, 1)
    kv.bind([1], [1])
    q, k = (to_torch(np.ones((1, n, 32), np.float32), device=device) for n in (6, 2))
    for entry in (backend.fwd_decode, backend.fwd_prefill):
        with pytest.raises(ValueError, match="causal_offset 3 with a KV cache; expected -1"):
            entry(q, k, k, kv=kv, causal_offset=3)


# ---- bad arguments, gradients -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((1, 4, 6, 32), (1, 5, 4, 32), (1, 5, 4, 32)), {}, "heads"),
        (((1, 4, 6, 32), (2, 5, 2, 32), (2, 5, 2, 32)), {}, "k"),
        (((1, 4, 6, 32), (1, 5, 2, 32), (1, 6, 2, 32)), {}, "v"),
        (((4, 6, 32), (1, 5, 2, 32), (1, 5, 2, 32)), {}, "q has shape"),
        (((1, 4, 6, 32), (1, 5, 2, 32), (1, 5, 2, 32)), {"window": 0}, "window"),
        (((1, 4, 6, 32), (1, 5, 2, 32), (1, 5, 2, 32)), {"softcap": -1.0}, "softcap"),
        (((1, 4, 6, 32), (1, 5, 2, 32), (1, 5, 2, 32)), {"causal_offset": -2}, "causal_offset"),
        (((1, 4, 6, 32), (1, 5, 2, 32), (1, 5, 2, 32)), {"mask": (1, 4)}, "mask"),
        (((1, 4, 6, 32), (1, 5, 2, 32), (1, 5, 2, 32)), {"sinks": 5}, "sinks"),
    ],
)
def test_bad_dense_arguments(backend, device, shapes, options, message):
    import torch

    options = dict(options)
    if "mask" in options:
        options["mask"] = torch.ones(options["mask"], dtype=torch.bool, device=device)
    if "sinks" in options:
        options["sinks"] = torch.ones(options["sinks"], device=device)
    with pytest.raises(ValueError, match=message):
        backend.fwd_prefill(*(torch.ones(shape, device=device) for shape in shapes), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal_offset": 0},
        {"causal_offset": 1, "window": 2},
        {"causal_offset": 0, "softcap": 2.0, "sinks": True},
        {"mask": True},
    ],
)
def test_torch_native_is_differentiable(options):
    import torch

    from astrai.attention import TorchNativeBackend

    torch.manual_seed(0)
    options = dict(options)
    q, k, v = (
        torch.randn(2, length, heads, 4, dtype=torch.float64, requires_grad=True)
        for length, heads in ((3, 4), (4, 2), (4, 2))
    )
    inputs = [q, k, v]
    if options.pop("mask", False):
        keep = torch.rand(2, 3, 4) < 0.5
        keep[0, 0] = False  # a row that sees nothing has a gradient of zero, not NaN
        options["mask"] = keep
    if options.pop("sinks", False):
        inputs.append(torch.randn(4, dtype=torch.float64, requires_grad=True))

    def run(q, k, v, sinks=None):
        return TorchNativeBackend().fwd_prefill(q, k, v, sinks=sinks, **options)

    assert torch.autograd.gradcheck(run, inputs)
