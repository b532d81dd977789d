"""The flash-attn backend: why it is unavailable, and what it asks of the package.

The package needs a GPU, so a stand-in takes its place here. It computes what the package documents
(limits and windows aligned with the last key) from the arguments that it is given.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types

import numpy as np
import pytest

import attention_reference as reference
from test_attention_backends import make_cache, run_step, to_torch


def reference_flash(q, k, v, causal, window_size, softcap, scale):
    """q [B, Lq, Hq, D], k and v [B, Lk, Hkv, D]; the last query stands at the last key."""
    q_len, kv_len = q.shape[1], k.shape[1]
    positions = kv_len - q_len + np.arange(q_len)[:, None]
    keys = np.arange(kv_len)
    left, right = window_size
    seen = np.ones((q_len, kv_len), bool)
    if causal or right >= 0:
        seen &= keys <= positions + (0 if causal else right)
    if left >= 0:
        seen &= keys >= positions - left
    seen = np.broadcast_to(seen, (q.shape[0], q_len, kv_len))
    out, _ = reference.attention(
        *(tensor.float().numpy() for tensor in (q, k, v)), seen, softcap=softcap, scale=scale
    )
    return to_torch(out.astype(np.float32)).to(q.dtype)


class StandIn(types.ModuleType):
    """flash_attn's three entry points, and which of them were called."""

    __version__ = "2.7.4"

    def __init__(self):
        super().__init__("flash_attn")
        self.calls = []

    def flash_attn_func(
        self, q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0
    ):
        self.calls.append("dense")
        return reference_flash(q, k, v, causal, window_size, softcap, softmax_scale)

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        *,
        cache_seqlens,
        block_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
    ):
        import torch

        assert k_cache.shape[1] % 256 == 0
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        self.calls.append("kvcache")
        rows = []
        for index, length in enumerate(cache_seqlens.tolist()):
            k, v = (
                pages[block_table[index].long()].flatten(0, 1)[None, :length]
                for pages in (k_cache, v_cache)
            )
            own = q[index : index + 1]
            rows.append(reference_flash(own, k, v, causal, window_size, softcap, softmax_scale))
        return torch.cat(rows)

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        softcap,
        block_table=None,
    ):
        import torch

        self.calls.append("varlen" if block_table is None else "varlen_paged")
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert max(np.diff(q_ends)) == max_seqlen_q
        assert max(np.diff(k_ends)) == max_seqlen_k
        rows = []
        for index in range(len(q_ends) - 1):
            own = q[None, q_ends[index] : q_ends[index + 1]]
            if block_table is None:
                cut = slice(k_ends[index], k_ends[index + 1])
                keys, values = k[None, cut], v[None, cut]
            else:
                length = k_ends[index + 1] - k_ends[index]
                keys, values = (
                    pages[block_table[index].long()].flatten(0, 1)[None, :length]
                    for pages in (k, v)
                )
            rows.append(
                reference_flash(own, keys, values, causal, window_size, softcap, softmax_scale)[0]
            )
        return torch.cat(rows)


@pytest.fixture
def package(monkeypatch):
    from astrai.attention import flash

    stand_in = StandIn()
    monkeypatch.setattr(flash, "_package", lambda: stand_in)
    return stand_in


@pytest.fixture
def backend(package):
    from astrai.attention import FlashAttnBackend

    return FlashAttnBackend()


@pytest.fixture
def availability(monkeypatch):
    """flash_attn_available with a cleared cache and a machine of the test's choice."""
    import torch

    from astrai.attention import flash

    def build(installed=True, cuda=True, capability=(9, 0), version="2.7.4", fails=None):
        stand_in = StandIn()
        stand_in.__version__ = version

        def probe(*tensors, **options):
            if fails:
                raise RuntimeError(fails)
            stand_in.calls.append("dense")

        stand_in.flash_attn_func = probe
        spec = object() if installed else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        monkeypatch.setattr(flash, "_package", lambda: stand_in)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch, "zeros", lambda *shape, **options: None)
        flash.flash_attn_available.cache_clear()
        return stand_in

    yield build
    flash.flash_attn_available.cache_clear()


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"installed": False}, "not installed"),
        ({"cuda": False}, "needs a CUDA device"),
        ({"capability": (7, 5)}, "needs compute capability 8.0; the device has 7.5"),
        ({"version": "2.5.9"}, "2.5.9 is installed; 2.6 or later is needed"),
        ({"fails": "no kernel image"}, "does not run: no kernel image"),
    ],
)
def test_unavailable_with_a_reason(availability, machine, reason):
    from astrai.attention import FlashAttnBackend, flash_attn_available

    availability(**machine)
    assert not flash_attn_available()
    assert reason in flash_attn_available().reason
    assert FlashAttnBackend.unavailable_reason() == flash_attn_available().reason


def test_one_real_kernel_decides_once(availability):
    import torch

    from astrai.attention import FlashAttnBackend, flash_attn_available

    stand_in = availability()
    assert flash_attn_available()
    assert flash_attn_available()
    assert stand_in.calls == ["dense"]
    assert FlashAttnBackend.unavailable_reason() is None
    assert FlashAttnBackend.cannot_serve("cuda", torch.bfloat16, 64) is None
    assert "head_dim 65" in (FlashAttnBackend.cannot_serve("cuda", torch.bfloat16, 65) or "")


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 3.0, "scale": 0.3}])
@pytest.mark.parametrize("causal_offset", [-1, 0, 2, 5])
def test_dense(backend, package, options, causal_offset):
    generator = np.random.default_rng(0)
    q = generator.standard_normal((2, 4, 6, 32), np.float32)
    k, v = (generator.standard_normal((2, 9, 2, 32), np.float32) for _ in range(2))
    seen = reference.visible_keys(
        2, 4, 9, causal_offset=causal_offset, window=options.get("window", -1)
    )
    scores = {name: value for name, value in options.items() if name != "window"}
    expected, _ = reference.attention(q, k, v, seen, **scores)
    tensors = [to_torch(array) for array in (q, k, v)]
    out = backend.fwd_prefill(*tensors, causal_offset=causal_offset, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert package.calls == ["dense"]


@pytest.mark.parametrize("options", [{}, {"window": 6, "softcap": 2.0, "scale": 0.3}])
@pytest.mark.parametrize(
    ("page_size", "calls"), [(16, {"varlen"}), (256, {"varlen_paged", "kvcache"})]
)
def test_paged(backend, package, page_size, calls, options):
    generator, history = np.random.default_rng(1), {}
    kv = make_cache(page_size)
    for task in (1, 2):
        kv.pool.add_task(task)
    for tasks, q_lens in (([1, 2], [5, 19]), ([2, 1], [1, 7]), ([1, 2], [1, 1])):
        run_step(backend, kv, tasks, q_lens, generator, history, options, "float32")
    assert set(package.calls) == calls


def test_what_the_package_lacks_is_refused(backend, package):
    import torch

    q = torch.ones(1, 2, 4, 32)
    for name, value in (("mask", torch.ones(1, 2, dtype=torch.bool)), ("sinks", torch.ones(4))):
        with pytest.raises(ValueError, match=f"{name} given; expected None"):
            backend.fwd_prefill(q, q, q, **{name: value})
    with pytest.raises(ValueError, match="causal_offset 1 with 2 queries and 2 keys"):
        backend.fwd_prefill(q, q, q, causal_offset=1)
    assert package.calls == []


def test_without_the_package_an_explicit_choice_names_the_reason(availability):
    import torch

    from astrai.attention import attn_backend, select_backend

    availability(installed=False)
    with attn_backend("flash"), pytest.raises(RuntimeError, match="not installed"):
        select_backend("cuda", torch.bfloat16, 64)


def test_nothing_imports_the_package_before_it_is_needed(tmp_path):
    """Neither importing astrai, nor choosing on a CPU, nor asking why a GPU is missing does."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('flash_attn was imported')")
    code = """
import torch
from astrai.attention import flash_attn_available, select_backend
select_backend("cpu", torch.float32, 64)
torch.cuda.is_available = lambda: False
print(flash_attn_available().reason)
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda: (9, 0)
flash_attn_available.cache_clear()
print(flash_attn_available().reason)
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path},
        check=True,
    )
    assert result.stdout.splitlines() == [
        "flash-attn needs a CUDA device and torch sees none",
        "flash-attn is installed but does not run: flash_attn was imported",
    ]
