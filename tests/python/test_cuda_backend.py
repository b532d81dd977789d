"""CudaBackend over a paged cache: selection, graphs, filler rows, page copies, allocations."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from astrai.extension.loader import load
from test_attention_backends import Shape, make_cache, run_step

pytestmark = pytest.mark.gpu


@pytest.fixture
def backend():
    from astrai.attention import CudaBackend

    return CudaBackend()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_chosen_for_cuda_tensors_without_a_word(monkeypatch, caplog, dtype):
    import torch

    from astrai.attention import ATTN_BACKEND, attn_backend, registry

    monkeypatch.delenv("ASTRAI_ATTN_BACKEND", raising=False)
    monkeypatch.setattr(registry, "_logged", set())
    with caplog.at_level(logging.WARNING, "astrai.attention"):
        for device in ("cuda", "cuda:0", torch.device("cuda", 0)):
            chosen = registry.select_backend(device, getattr(torch, dtype), 64)
            assert chosen.kind is ATTN_BACKEND.CUDA
    assert caplog.records == []
    with attn_backend("cuda"), pytest.raises(ValueError, match="head_dim 48; it serves 32"):
        registry.select_backend("cuda", torch.float32, 48)


def test_facts_of_the_device():
    facts = load().cuda_device_facts(0)
    assert load().cuda_unavailable_reason(0) == ""
    assert any(
        name.rstrip("af") == f"{facts.compute_major}{facts.compute_minor}"
        or int(name.rstrip("af")) // 10 == facts.compute_major
        for name in load().cuda_architectures()
    )
    assert "there is no CUDA device 99" in load().cuda_unavailable_reason(99)


def test_new_rows_are_written_by_the_kernel():
    """Also where torch's attention runs; and exactly as torch would write them."""
    import torch

    torch.manual_seed(0)
    kernel, plain = (make_cache(device="cuda") for _ in range(2))
    plain._writes_by_kernel = False
    for kv in (kernel, plain):
        kv.pool.add_task(1)
        assert kv.pool.try_reserve(1, 9)
        kv.bind([1], [9], pad_to=3)
    k, v = torch.randn(2, 11, 2, 32, device="cuda")
    load().reset_counters()
    kernel.write(1, k, v)
    assert load().counters()["launches"] == 1
    plain.write(1, k, v)
    assert load().counters()["launches"] == 1
    assert kernel.storage.nan_to_num(9.0).equal(plain.storage.nan_to_num(9.0))
    with pytest.raises(ValueError, match="kv_write: "):
        kernel.write(1, k[:5], v[:5])


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_steady_decode_allocates_nothing_and_never_waits(backend, batch):
    kv = make_cache(device="cuda", max_batch=8, max_context=128)
    history, generator = {}, np.random.default_rng(0)
    tasks = list(range(batch))
    for task in tasks:
        kv.pool.add_task(task)

    def step(q_lens):
        run_step(backend, kv, tasks, q_lens, generator, history, {}, "float32")

    step([40 // batch + 1] * batch)
    step([1] * batch)
    load().reset_counters()
    for _ in range(10):
        step([1] * batch)
    counted = load().counters()
    assert counted["device_allocations"] == counted["host_allocations"] == 0
    assert counted["synchronizations"] == 0
    assert counted["launches"] in (2 * 10, 3 * 10)  # one write, one attention, perhaps a merge


def test_long_requests_use_the_partials_of_the_workspace(backend):
    """A lone long request is cut into many parts, for which the workspace has room."""
    import torch

    kv = make_cache(16, "bfloat16", "cuda", max_batch=2, max_context=1900, max_step_tokens=1900)
    kv.pool.add_task(1)
    assert kv.pool.try_reserve(1, 1800)
    kv.bind([1], [1800])
    torch.manual_seed(0)
    k, v = torch.randn(2, 1800, 2, 32, device="cuda").bfloat16()
    kv.write(0, k, v)
    kv.pool.append(1, 1800)
    assert kv.pool.try_reserve(1, 1)
    step = kv.bind([1], [1])
    assert step.o_part.shape[2] >= 1800 // 64
    q = torch.randn(1, 6, 32, device="cuda").bfloat16()
    new = torch.randn(2, 1, 2, 32, device="cuda").bfloat16()
    backend.fwd_decode(q, *new, kv=kv)
    load().reset_counters()
    out = backend.fwd_decode(q, *new, kv=kv)
    counted = load().counters()
    assert counted["device_allocations"] == 0
    keys, values = torch.cat((k, new[0])), torch.cat((v, new[1]))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double()[None].transpose(1, 2),
        *(t.double().repeat_interleave(3, 1)[None].transpose(1, 2) for t in (keys, values)),
    )
    torch.testing.assert_close(out.double(), wanted[0].transpose(0, 1), rtol=2e-2, atol=2e-2)


# ---- graphs, filler rows ----------------------------------------------------------------------


class Replayed:
    """Decode steps of a cache, in a captured graph or eagerly, on the same inputs."""

    def __init__(self, backend, dtype, num_live, num_pages, captured):
        import torch

        from astrai.kv_cache import KVCache

        self.backend, self.pad_to, self.graph = backend, 1 << num_live.bit_length(), None
        self.tasks = list(range(num_live))
        kv = KVCache(
            Shape(), num_pages, 16, dtype, "cuda", max_batch=8, max_context=128, max_step_tokens=256
        )
        kv.storage.fill_(3.0)
        self.kv = kv
        generator = torch.Generator("cuda")
        generator.manual_seed(1)
        self.inputs = [
            torch.randn(self.pad_to, heads, 32, device="cuda", generator=generator).to(dtype)
            for heads in (6, 2, 2)
        ]
        for task in self.tasks:
            kv.pool.add_task(task)
            assert kv.pool.try_reserve(task, 23)  # two pages each, for all steps to come
            self._fill(task, 3 + task, generator)
        # One request that is not in the batch owns what is left, to the last slot of the pool.
        kv.pool.add_task(99)
        left = 16 * kv.pool.num_free_pages
        assert kv.pool.try_reserve(99, left)
        self._fill(99, left, generator)
        self.idle_pages = kv.pool.pages(99)
        assert num_pages - 1 in self.idle_pages
        self.bind()
        self._run()  # kernels get ready outside of the capture; the step itself is done again
        if captured:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._run()

    def _fill(self, task, count, generator):
        import torch

        kv = self.kv
        kv.bind([task], [count])
        k, v = torch.randn(2, count, 2, 32, device="cuda", generator=generator).to(kv.dtype)
        for layer in range(kv.num_layers):
            kv.write(layer, k, v)
        kv.pool.append(task, count)

    def _run(self):
        self.out = self.backend.fwd_decode(*self.inputs, kv=self.kv, layer_id=1)

    def bind(self):
        for task in self.tasks:
            assert self.kv.pool.try_reserve(task, 1)
        self.kv.bind(self.tasks, [1] * len(self.tasks), pad_to=self.pad_to)

    def step(self, inputs):
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.bind()
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        for task in self.tasks:
            self.kv.pool.append(task, 1)
        return self.out.clone()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("num_live", "num_pages"), [(3, 8), (5, 16)])
def test_replayed_graph_is_the_eager_step_and_spares_idle_pages(
    backend, dtype, num_live, num_pages
):
    """3 requests in a graph for 4 and 5 in one for 8, over 20 steps of growing lengths."""
    import torch

    kind = getattr(torch, dtype)
    graph, eager = (
        Replayed(backend, kind, num_live, num_pages, captured) for captured in (True, False)
    )
    assert graph.pad_to == (4 if num_live == 3 else 8)
    idle = graph.kv.storage[:, :, graph.idle_pages].clone()
    torch.manual_seed(2)
    for _ in range(20):
        inputs = [torch.randn_like(tensor) for tensor in graph.inputs]
        for tensor in inputs:
            tensor[num_live:] = float("nan")  # what filler rows hold reaches no real row
        got, wanted = graph.step(inputs), eager.step(inputs)
        assert got[:num_live].equal(wanted[:num_live])
        assert got[:num_live].isfinite().all()
        assert not got[num_live:].any()
    assert graph.kv.storage.equal(eager.kv.storage)
    assert graph.kv.storage[:, :, graph.idle_pages].equal(idle)
    assert graph.kv.storage.isfinite().all()
    graph.kv.pool.check_integrity()


def test_graph_grows_beyond_the_captured_lengths(backend):
    """Captured at a few keys, replayed up to the context; every step against float64."""
    import torch

    kv = make_cache(4, device="cuda", max_batch=2, max_context=128)
    kv.pool.add_task(1)
    generator, history = np.random.default_rng(0), {}
    run_step(backend, kv, [1], [2], generator, history, {}, "float32")
    q, k, v = (torch.zeros(2, heads, 32, device="cuda") for heads in (6, 2, 2))
    assert kv.pool.try_reserve(1, 1)
    kv.bind([1], [1], pad_to=2)
    backend.fwd_decode(q, k, v, kv=kv, layer_id=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.fwd_decode(q, k, v, kv=kv, layer_id=1)

    class Replaying:
        """Looks like a backend to run_step."""

        def fwd_decode(self, new_q, new_k, new_v, *, kv, layer_id):
            for own, new in zip((q, k, v), (new_q, new_k, new_v), strict=True):
                own.copy_(new)
            graph.replay()
            return captured.clone()

    for _ in range(100):
        run_step(Replaying(), kv, [1], [1], generator, history, {}, "float32", pad_to=2)


# ---- page copies ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fork_copies_its_last_page_in_every_layer(backend, dtype):
    kv = make_cache(device="cuda", dtype=dtype)
    generator, history = np.random.default_rng(0), {}
    kv.pool.add_task(1)
    run_step(backend, kv, [1], [6], generator, history, {}, dtype)
    kv.storage[:, 0, kv.pool.pages(1)] = 5.0  # the layer that no step of this test writes
    kv.pool.fork(1, 2)
    history[2] = tuple(list(part) for part in history[1])
    run_step(backend, kv, [1, 2], [1, 1], generator, history, {}, dtype)
    first, second = kv.pool.pages(1), kv.pool.pages(2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    pages = kv.storage[:, 0, [first[1], second[1]]]
    assert (pages[:, :, :2] == 5.0).all()
    assert kv.pool.num_pending_copies == 0
    for task in (1, 2):
        kv.pool.free_task(task)
    kv.pool.check_integrity()
    assert kv.pool.num_free_pages == kv.num_pages
