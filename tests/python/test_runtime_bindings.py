"""Workspace, page pool and KV cache as Python sees them."""

from __future__ import annotations

import gc
import random
from typing import NamedTuple

import pytest


class Shape(NamedTuple):
    num_layers: int = 2
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden_size: int = 64
    vocab_size: int = 50


def make_shape(**changes):
    from astrai.workspace import WorkspaceShape

    sizes = {
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "hidden_size": 64,
        "vocab_size": 50,
        "max_batch": 4,
        "max_context": 64,
        "max_step_tokens": 32,
        "page_size": 16,
    }
    return WorkspaceShape(**(sizes | changes))


def make_cache(num_pages=12, page_size=4, **changes):
    import torch

    from astrai.kv_cache import KVCache

    sizes = {"max_batch": 4, "max_context": 40, "max_step_tokens": 32} | changes
    return KVCache(Shape(), num_pages, page_size, torch.float32, "cpu", **sizes)


# ---- workspace --------------------------------------------------------------------------------


def test_measure_is_pure_and_exact():
    from astrai.workspace import InferenceWorkspace

    layout = InferenceWorkspace.measure(make_shape())
    end = 0
    for part in layout.slices:
        assert part.offset % 256 == 0
        assert part.offset >= end
        end = part.offset + part.bytes
    assert layout.total_bytes == end
    assert layout.find("o_part").shape == [4, 4, 16, 32]
    assert InferenceWorkspace.measure(make_shape(max_batch=8)).total_bytes > end


def test_views_are_aligned_disjoint_and_stable():
    from astrai.workspace import InferenceWorkspace

    workspace = InferenceWorkspace(make_shape())
    assert workspace.slab.numel() == workspace.num_bytes == workspace.layout.total_bytes
    names = [part.name for part in workspace.layout.slices]
    for index, name in enumerate(names):
        view = workspace.view(name)
        assert getattr(workspace, name) is view is workspace.view(name)
        assert view.data_ptr() % 256 == 0
        view.flatten().view(dtype=workspace.slab.dtype).fill_(index)
    for index, name in enumerate(names):
        assert (workspace.view(name).flatten().view(dtype=workspace.slab.dtype) == index).all()
    assert workspace.logits.shape == (4, 50)


def test_unknown_slices_and_bad_shapes():
    from astrai.workspace import InferenceWorkspace

    workspace = InferenceWorkspace(make_shape())
    with pytest.raises(ValueError, match=r"nothing.*expected one of.*kv_lens"):
        workspace.view("nothing")
    with pytest.raises(AttributeError, match="nothing"):
        _ = workspace.nothing
    with pytest.raises(ValueError, match=r"o_parts.*expected one of.*o_part"):
        workspace.layout.find("o_parts")
    for change in (
        {"max_batch": 0},
        {"num_kv_heads": 3},
        {"max_step_tokens": 1},
        {"page_size": -1},
        {"max_context": 2**62},
    ):
        with pytest.raises(ValueError, match=r"expected"):
            InferenceWorkspace.measure(make_shape(**change))
    with pytest.raises(ValueError, match=r'dtype "int8"; expected one of float32'):
        make_shape(dtype="int8")


def test_a_slab_of_the_wrong_size_is_refused():
    import torch

    from astrai.extension.loader import load

    shape = make_shape()
    total = load().plan_workspace(shape).total_bytes
    for size in (total - 1, total + 256, 0):
        slab = torch.empty(size + 256, dtype=torch.uint8)
        start = -slab.data_ptr() % 256
        with pytest.raises(ValueError, match=f"{size} bytes; expected.*{total}"):
            load().InferenceWorkspace(shape, slab[start : start + size])
    slab = torch.empty(total + 512, dtype=torch.uint8)
    start = -slab.data_ptr() % 256 + 8
    with pytest.raises(ValueError, match="256"):
        load().InferenceWorkspace(shape, slab[start : start + total])


def test_other_devices_are_refused():
    from astrai.workspace import InferenceWorkspace

    with pytest.raises(ValueError, match="workspace: device meta; expected cpu or cuda"):
        InferenceWorkspace(make_shape(), "meta")


# ---- pool -------------------------------------------------------------------------------------


def test_pool_life_of_a_task():
    from astrai.kv_cache import PagePool

    pool = PagePool(4, 8)
    pool.add_task(1)
    assert pool.try_reserve(1, 17)
    assert (pool.length(1), len(pool.pages(1)), pool.num_free_pages) == (0, 3, 1)
    pool.append(1, 17)
    assert not pool.try_reserve(1, 16)  # out of pages is a result
    assert (pool.length(1), pool.num_free_pages) == (17, 1)
    pool.truncate(1, 8)
    assert (pool.length(1), pool.num_free_pages) == (8, 3)
    pool.add_task(2, shared_pages=pool.pages(1), num_tokens=8)
    assert pool.ref_count(pool.pages(1)[0]) == 2
    pool.check_integrity()
    pool.free_task(1)
    assert pool.ref_count(pool.pages(2)[0]) == 1
    pool.free_task(2)
    assert pool.num_free_pages == pool.num_pages == 4
    pool.check_integrity()


def test_fork_copies_on_write():
    from astrai.kv_cache import PagePool

    pool = PagePool(8, 4)
    pool.add_task(1)
    assert pool.try_reserve(1, 6)
    pool.append(1, 6)
    pool.fork(1, 2)
    shared = pool.pages(1)
    assert pool.pages(2) == shared
    assert pool.try_reserve(2, 1)
    own = pool.pages(2)[1]
    assert own != shared[1]
    assert pool.num_pending_copies == 1
    assert pool.take_page_copies() == [(shared[1], own)]
    assert pool.take_page_copies() == []
    pool.check_integrity()


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.add_task(1),
        lambda pool: pool.add_task(2, shared_pages=[99], num_tokens=4),
        lambda pool: pool.add_task(2, shared_pages=[-1], num_tokens=4),
        lambda pool: pool.add_task(2, shared_pages=[0], num_tokens=3),
        lambda pool: pool.add_task(2, num_tokens=3),
        lambda pool: pool.fork(9, 2),
        lambda pool: pool.fork(1, 1),
        lambda pool: pool.try_reserve(9, 1),
        lambda pool: pool.try_reserve(1, -1),
        lambda pool: pool.append(1, 100),
        lambda pool: pool.append(1, -1),
        lambda pool: pool.truncate(1, 6),
        lambda pool: pool.free_task(9),
        lambda pool: pool.length(9),
        lambda pool: pool.pages(9),
        lambda pool: pool.ref_count(8),
    ],
)
def test_bad_calls_change_nothing(call):
    from astrai.kv_cache import PagePool

    pool = PagePool(8, 4)
    pool.add_task(1)
    assert pool.try_reserve(1, 5)
    pool.append(1, 5)
    before = (pool.num_tasks, pool.num_free_pages, pool.length(1), pool.pages(1))
    with pytest.raises(ValueError, match="expected"):
        call(pool)
    assert before == (pool.num_tasks, pool.num_free_pages, pool.length(1), pool.pages(1))
    pool.check_integrity()


def test_pool_sizes_are_checked():
    from astrai.kv_cache import PagePool

    for sizes in ((0, 16), (-1, 16), (4, 0), (2**31, 16)):
        with pytest.raises(ValueError, match="expected"):
            PagePool(*sizes)
    with pytest.raises(TypeError):
        PagePool("four", 16)


def test_random_sequences_drain_to_an_empty_pool():
    from astrai.kv_cache import PagePool

    generator, pool, tasks, following = random.Random(7), PagePool(12, 4), [], 0
    for _ in range(3000):
        action = generator.choice(("add", "grow", "grow", "fork", "cut", "free"))
        if action == "add":
            pool.add_task(following)
            tasks.append(following)
            following += 1
        elif tasks:
            task = generator.choice(tasks)
            if action == "grow":
                count = generator.randint(1, 9)
                if pool.try_reserve(task, count):
                    pool.append(task, count)
            elif action == "fork":
                pool.fork(task, following)
                tasks.append(following)
                following += 1
            elif action == "cut":
                pool.truncate(task, generator.randint(0, pool.length(task)))
            else:
                pool.free_task(task)
                tasks.remove(task)
                with pytest.raises(ValueError, match="expected"):
                    pool.free_task(task)
        if generator.random() < 0.5:
            pool.take_page_copies()
        pool.check_integrity()
    for task in tasks:
        pool.free_task(task)
    pool.take_page_copies()
    pool.check_integrity()
    assert pool.num_free_pages == 12


# ---- KV cache ---------------------------------------------------------------------------------


def test_bind_describes_the_step():
    kv = make_cache()
    for task, tokens in ((7, 5), (9, 0)):
        kv.pool.add_task(task)
        assert kv.pool.try_reserve(task, tokens + 3)
        kv.pool.append(task, tokens)
    step = kv.bind([9, 7], [3, 1])
    assert step is kv.step
    assert (step.phase, step.num_tasks, step.num_tokens) == ("prefill", 2, 4)
    assert (step.max_q_len, step.max_kv_len) == (3, 6)
    assert step.qo_indptr.tolist() == [0, 3, 4]
    assert step.kv_lens.tolist() == step.host_kv_lens == [3, 6]
    assert step.positions.tolist() == [0, 1, 2, 5]
    assert step.last_rows.tolist() == [2, 3]
    assert step.kv_indptr.tolist() == [0, 1, 3]
    own, other = kv.pool.pages(9), kv.pool.pages(7)
    assert step.kv_indices.tolist() == [*own[:1], *other[:2]]
    assert step.slot_mapping.tolist() == [*(own[0] * 4 + i for i in range(3)), other[1] * 4 + 1]
    assert step.positions.dtype == step.slot_mapping.dtype == step.last_rows.dtype
    assert str(step.positions.dtype) == "torch.int64"
    assert str(step.kv_indices.dtype) == "torch.int32"
    assert step.positions.data_ptr() == kv.workspace.positions.data_ptr()
    requests = step.requests()
    assert [(q_len, kv_len, pages.tolist()) for q_len, kv_len, pages in requests] == [
        (3, 3, own[:1]),
        (1, 6, other[:2]),
    ]


def test_bind_reuses_views_and_steps_forward():
    kv = make_cache()
    kv.pool.add_task(1)
    assert kv.pool.try_reserve(1, 2)
    first = kv.bind([1], [1])
    assert first.phase == "decode"
    kv.pool.append(1, 1)
    second = kv.bind([1], [1])
    assert second.positions is first.positions
    assert second.positions.tolist() == [1]
    assert second.cache is not first.cache


def test_bind_refuses_what_the_step_cannot_hold():
    kv = make_cache()
    for task in range(5):
        kv.pool.add_task(task)
    assert kv.pool.try_reserve(0, 8)
    kv.bind([0], [8])
    kept = kv.step
    for tasks, q_lens, message in (
        ([9], [1], "9"),
        ([0, 0], [1, 1], "0"),
        ([0], [0], "q_len"),
        ([0], [9], "expected"),
        ([0, 1], [1], "expected"),
        ([0, 1, 2, 3, 4], [1] * 5, "expected"),
        ([], [], "expected"),
    ):
        with pytest.raises(ValueError, match=message):
            kv.bind(tasks, q_lens)
        assert kv.step is kept
    assert kv.pool.try_reserve(0, 33)
    with pytest.raises(ValueError, match="max_step_tokens"):
        kv.bind([0], [33])


def test_step_before_bind_is_an_error():
    with pytest.raises(RuntimeError, match="no step is bound"):
        _ = make_cache().step


def test_write_and_page_copies_reach_every_layer():
    import torch

    kv = make_cache()
    kv.storage.zero_()
    kv.pool.add_task(1)
    assert kv.pool.try_reserve(1, 6)
    kv.bind([1], [6])
    rows = torch.randn(2, 6, 2, 32)
    for layer in range(2):
        kv.write(layer, rows[0] + layer, rows[1] + layer)
    kv.pool.append(1, 6)
    kv.pool.fork(1, 2)
    assert kv.pool.try_reserve(2, 1)
    kv.bind([2], [1])  # does the copy
    for layer in range(2):
        for pages, wanted in ((kv.k_pages, rows[0]), (kv.v_pages, rows[1])):
            gathered = pages[layer][kv.pool.pages(2)].flatten(0, 1)
            torch.testing.assert_close(gathered[:6], wanted + layer, rtol=0, atol=0)
    assert kv.pool.num_pending_copies == 0


def test_write_refuses_other_shapes():
    import torch

    kv = make_cache()
    kv.pool.add_task(1)
    assert kv.pool.try_reserve(1, 2)
    kv.bind([1], [2])
    good = torch.ones(2, 2, 32)
    for bad in (torch.ones(3, 2, 32), torch.ones(2, 1, 32), torch.ones(2, 2, 32).half()):
        with pytest.raises(ValueError, match="kv_write: "):
            kv.write(0, bad, good)
        with pytest.raises(ValueError, match="kv_write: "):
            kv.write(0, good, bad)


def test_memory_is_accounted():
    import torch

    from astrai.kv_cache import KVCache

    kv = make_cache(num_pages=12, page_size=4)
    page = KVCache.page_bytes(Shape(), 4, torch.float32)
    assert page == 2 * 2 * 4 * 2 * 32 * 4
    assert kv.num_bytes == 12 * page + kv.workspace.num_bytes
    assert kv.k_pages[0].shape == kv.v_pages[1].shape == (12, 4, 2, 32)
    assert kv.num_layers == 2


@pytest.mark.parametrize(
    "change",
    [
        {"num_pages": 0},
        {"page_size": 0},
        {"max_batch": 0},
        {"max_context": 0},
        {"max_step_tokens": 1},
    ],
)
def test_cache_sizes_are_checked(change):
    with pytest.raises(ValueError, match="expected"):
        make_cache(**change)


def test_cache_dtype_is_checked():
    import torch

    from astrai.kv_cache import KVCache

    with pytest.raises(ValueError, match=r"torch.int8; expected one of float32"):
        KVCache(Shape(), 4, 4, torch.int8, "cpu", 4, 16, 16)


def test_compiled_objects_keep_their_memory_alive():
    import torch

    from astrai.extension.loader import load

    ext, shape = load(), make_shape(max_batch=2)

    def build():
        pool = ext.PagePool(4, 16)
        pool.add_task(1)
        assert pool.try_reserve(1, 3)
        total = ext.plan_workspace(shape).total_bytes
        raw = torch.zeros(total + 256, dtype=torch.uint8)
        start = -raw.data_ptr() % 256
        workspace = ext.InferenceWorkspace(shape, raw[start : start + total])
        k, v = torch.zeros(2, 2, 4, 16, 2, 32).unbind(0)
        return ext.KVCache(k, v, pool, workspace)

    kept = build()
    gc.collect()
    others = [torch.full((1 << 16,), 255, dtype=torch.uint8) for _ in range(8)]
    assert kept.bind([1], [3]).num_tokens == 3
    assert all((other == 255).all() for other in others)


def test_compiled_cache_must_fit_pool_and_workspace():
    import torch

    from astrai.extension.loader import load
    from astrai.workspace import InferenceWorkspace

    ext, workspace = load(), InferenceWorkspace(make_shape())
    pool = ext.PagePool(4, 16)
    good = torch.zeros(2, 4, 16, 2, 32)
    ext.KVCache(good, good, pool, workspace.core)
    for bad in (
        torch.zeros(2, 5, 16, 2, 32),
        torch.zeros(2, 4, 8, 2, 32),
        torch.zeros(2, 4, 16, 1, 32),
        torch.zeros(2, 4, 16, 2, 64),
        torch.zeros(2, 4, 16, 2, 32).half(),
        torch.zeros(4, 16, 2, 32),
    ):
        with pytest.raises(ValueError, match="expected"):
            ext.KVCache(bad, bad, pool, workspace.core)
