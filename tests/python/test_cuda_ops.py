"""Rotary, cache write, streams and refusals on a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest

from astrai.extension import ops
from astrai.extension.loader import load
from test_ops_layers import DTYPES, TOLERANCE, table, turned

pytestmark = pytest.mark.gpu


def normal(*shape, dtype="float32", seed=0):
    """A CUDA tensor of random values and the same values in float64."""
    import torch

    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    tensor = torch.from_numpy(values).to("cuda", getattr(torch, dtype))
    return tensor, tensor.double().cpu().numpy()


def close(actual, expected, dtype):
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(
        actual.double().cpu().numpy(), expected, rtol=tolerance, atol=tolerance
    )


# ---- rotary, kv_write -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 24, 64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_rotary(width, interleaved, dtype, index):
    import torch

    fused, exact = normal(7, 5, 64, dtype=dtype)
    q, k = fused[:, :4], fused[:, 4:]
    positions = np.array([0, 5, 1, 99, 3, 3, 42], index)
    cos_sin = table(100, width)
    before = fused.clone()
    given = torch.from_numpy(positions).cuda(), torch.from_numpy(cos_sin).cuda()
    assert ops.rotary(q, k, *given, interleaved=interleaved) is None
    close(fused, turned(exact, positions, cos_sin, interleaved), dtype)
    assert fused[..., width:].equal(before[..., width:])
    one = before.clone()
    ops.rotary(one[:, 4:], None, *given, interleaved=interleaved)
    assert one[:, 4:].equal(k)
    assert one[:, :4].equal(before[:, :4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80])
def test_kv_write_touches_only_its_slots(width, dtype):
    """Rows are parts of a fused projection, pages those of one layer; -1 writes nowhere."""
    import torch

    fused, _ = normal(4, 8, width, dtype=dtype)
    k, v = fused[:, 2:5], fused[:, 5:]
    storage = torch.full((2, 3, 5, 4, 3, width), 7.0, dtype=k.dtype, device="cuda")
    expected = storage.clone()
    slots = torch.tensor([5, -1, 9, 19], device="cuda")
    for row, slot in ((0, 5), (2, 9), (3, 19)):
        expected[0, 1, slot // 4, slot % 4] = k[row]
        expected[1, 1, slot // 4, slot % 4] = v[row]
    assert ops.kv_write(k, v, storage[0, 1], storage[1, 1], slots) is None
    assert storage.equal(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [32, 64])
def test_rotary_kv_write_is_both(width, interleaved, dtype):
    import torch

    fused, exact = normal(4, 8, 64, dtype=dtype)
    pages = torch.full((2, 3, 4, 2, 64), 7.0, dtype=fused.dtype, device="cuda")
    positions, slots = torch.tensor([2, 0, 9, 5]), torch.tensor([5, -1, 9, 0])
    separate, separate_pages = fused.clone(), pages.clone()
    cos_sin = table(10, width)

    def arguments(heads):
        return heads[:, :4], heads[:, 4:6], heads[:, 6:]

    given = positions.cuda(), torch.from_numpy(cos_sin).cuda()
    ops.rotary_kv_write(
        *arguments(fused), *given, pages[0], pages[1], slots.cuda(), interleaved=interleaved
    )
    wanted = turned(exact, positions.numpy(), cos_sin, interleaved)
    wanted[:, 6:] = exact[:, 6:]
    close(fused, wanted, dtype)
    q, k, v = arguments(separate)
    ops.rotary(q, k, *given, interleaved=interleaved)
    ops.kv_write(k, v, separate_pages[0], separate_pages[1], slots.cuda())
    assert fused.equal(separate)
    assert pages.equal(separate_pages)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_apply_rotary_emb_takes_the_kernel_unless_gradients_are_asked_for(dtype):
    import torch

    from astrai.attention import apply_rotary_emb

    q, _ = normal(5, 4, 64, dtype=dtype)
    k, _ = normal(5, 2, 64, dtype=dtype, seed=1)
    positions = torch.tensor([0, 3, 1, 99, 7], device="cuda")
    cos_sin = torch.from_numpy(table(100, 64)).cuda()
    wanted = apply_rotary_emb(
        q.clone().requires_grad_(), k.clone().requires_grad_(), positions, cos_sin
    )
    assert wanted[0].requires_grad
    load().reset_counters()
    got = apply_rotary_emb(q, k, positions, cos_sin)
    assert load().counters()["launches"] == 1
    assert got[0] is q
    assert got[1] is k
    for actual, expected in zip(got, wanted, strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected.detach(), rtol=tolerance, atol=tolerance)


# ---- streams ----------------------------------------------------------------------------------


class Wrapped:
    """A tensor of a library without an exchange table: only __dlpack__ is there."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("how", ["current", "current_wrapped", "given"])
def test_kernels_run_on_the_stream_of_the_call(how):
    """The input is written late on a side stream; a kernel on any other stream would miss it."""
    import torch

    wrap = Wrapped if how == "current_wrapped" else lambda tensor: tensor
    source, _ = normal(64, 2, 64)
    rows, pages = torch.zeros_like(source), torch.zeros(2, 4, 16, 2, 64, device="cuda")
    slots = torch.arange(64, device="cuda")
    side = torch.cuda.Stream()
    ops.kv_write(rows, rows, pages[0], pages[1], slots)  # the kernel is ready before the race
    torch.cuda.synchronize()
    options = {"stream": side.cuda_stream} if how == "given" else {}
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        rows.copy_(source)
        if how != "given":
            ops.kv_write(*map(wrap, (rows, rows, pages[0], pages[1], slots)))
    if how == "given":
        ops.kv_write(rows, rows, pages[0], pages[1], slots, **options)
    assert not side.query(), "the copy must still be under way"
    side.synchronize()
    assert pages[0].flatten(0, 1).equal(source)
    assert pages[1].flatten(0, 1).equal(source)


def test_nothing_waits_for_the_device():
    import torch

    rows, _ = normal(4, 2, 64)
    pages, slots = torch.zeros(2, 4, 16, 2, 64, device="cuda"), torch.arange(4, device="cuda")
    ops.kv_write(rows, rows, pages[0], pages[1], slots)
    torch.cuda.synchronize()
    load().reset_counters()
    torch.cuda._sleep(100_000_000)
    ops.kv_write(rows, rows, pages[0], pages[1], slots)
    assert not torch.cuda.current_stream().query()
    counted = load().counters()
    assert counted["launches"] == 1
    assert counted["synchronizations"] == counted["device_allocations"] == 0


# ---- misuse: the same refusal on both devices -------------------------------------------------


def dense_arguments(device):
    import torch

    q, k, v = (
        torch.ones(2, length, heads, 32, device=device)
        for length, heads in ((1, 4), (9, 2), (9, 2))
    )
    return {"q": q, "k": k, "v": v, "out": torch.full_like(q, 123.0)}


def paged_arguments(device):
    import torch

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    q = torch.ones(2, 4, 32, device=device)
    return {
        "q": q,
        "k_pages": torch.ones(5, 4, 2, 32, device=device),
        "v_pages": torch.ones(5, 4, 2, 32, device=device),
        "kv_indptr": ints(0, 2, 5),
        "kv_indices": ints(3, 1, 0, 2, 4),
        "kv_lens": ints(5, 9),
        "out": torch.full_like(q, 123.0),
    }


def ragged_arguments(device):
    import torch

    indptr = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    return paged_arguments(device) | {"qo_indptr": indptr}


def rotary_arguments(device):
    import torch

    return {
        "q": torch.full((3, 4, 32), 123.0, device=device),
        "k": torch.full((3, 2, 32), 123.0, device=device),
        "positions": torch.arange(3, device=device),
        "cos_sin": torch.ones(8, 32, device=device),
    }


def write_arguments(device):
    import torch

    return {
        "k": torch.ones(3, 2, 32, device=device),
        "v": torch.ones(3, 2, 32, device=device),
        "k_pages": torch.full((5, 4, 2, 32), 123.0, device=device),
        "v_pages": torch.full((5, 4, 2, 32), 123.0, device=device),
        "slot_mapping": torch.arange(3, device=device),
    }


def both_arguments(device):
    return rotary_arguments(device) | write_arguments(device)


ARGUMENTS = {
    "attn_decode": dense_arguments,
    "attn_prefill": dense_arguments,
    "attn_paged_decode": paged_arguments,
    "attn_paged_prefill": ragged_arguments,
    "rotary": rotary_arguments,
    "kv_write": write_arguments,
    "rotary_kv_write": both_arguments,
}
# (operation, argument, what is wrong with it, part of the message)
MISUSE = [
    ("attn_decode", "q", lambda t: t.repeat(1, 2, 1, 1), "q|out"),
    ("attn_decode", "q", lambda t: t[..., :30], "head_dim 30; expected one of 32, 64, 80"),
    ("attn_decode", "q", lambda t: t[:, :, :3], "heads|out"),
    ("attn_decode", "k", lambda t: t.half(), "k has dtype float16; expected float32"),
    ("attn_decode", "v", lambda t: t[:, 1:], "v has kv_len 8; expected 9"),
    ("attn_decode", "mask", lambda _: [[True] * 8] * 2, "mask has shape"),
    ("attn_decode", "window", lambda _: 0, "window is 0"),
    ("attn_decode", "softcap", lambda _: -1.0, "softcap is -1"),
    ("attn_decode", "causal_offset", lambda _: -2, "causal_offset is -2"),
    ("attn_decode", "fixed_split_keys", lambda _: 100, "fixed_split_keys is 100"),
    ("attn_decode", "out", lambda t: t[..., :16], "out has shape"),
    ("attn_decode", "out", lambda t: t[:1].expand(2, 1, 4, 32), "overlap"),
    ("attn_prefill", "k", lambda t: t.repeat_interleave(2, 3)[..., ::2], "stride 2 in its last"),
    ("attn_prefill", "num_splits", lambda _: 2, "num_splits is 2; expected 0 or 1"),
    ("attn_paged_decode", "q", lambda t: t.double(), "float64"),
    ("attn_paged_decode", "q", lambda t: t.int(), "int32"),
    ("attn_paged_decode", "k_pages", lambda t: t[..., :16], "head_dim 16; expected 32"),
    ("attn_paged_decode", "v_pages", lambda t: t[1:], "page count 4; expected 5"),
    ("attn_paged_decode", "kv_indptr", lambda t: t.long(), "dtype int64; expected int32"),
    ("attn_paged_decode", "kv_indptr", lambda t: t[:2], "kv_indptr has shape"),
    ("attn_paged_decode", "kv_lens", lambda t: t.repeat(2)[::2], "contiguous"),
    ("attn_paged_decode", "num_splits", lambda _: -1, "num_splits is -1"),
    ("attn_paged_decode", "scale", lambda _: float("nan"), "scale is"),
    ("attn_paged_prefill", "qo_indptr", lambda t: t[:2], "qo_indptr has shape"),
    ("attn_paged_prefill", "q", lambda t: t[:, None], "q has shape"),
    ("rotary", "cos_sin", lambda t: t[:, :31], "rotary width 31; expected an even"),
    ("rotary", "positions", lambda t: t.float(), "dtype float32; expected int32 or int64"),
    ("rotary", "positions", lambda t: t[:2], "positions"),
    ("rotary", "k", lambda t: t[..., :16], "k has"),
    ("kv_write", "v", lambda t: t[:2], "v has"),
    ("kv_write", "k", lambda t: t.half(), "dtype float16"),
    ("kv_write", "slot_mapping", lambda t: t.int(), "dtype int32; expected int64"),
    ("rotary_kv_write", "k_pages", lambda t: t[:, :, :1], "expected"),
    ("rotary_kv_write", "positions", lambda t: t[:2], "positions"),
]


def refusal(op, arguments):
    """The message with which an operation refuses; nothing may have been touched."""
    kept = {name: value.clone() for name, value in arguments.items() if hasattr(value, "clone")}
    with pytest.raises(ValueError) as caught:
        getattr(ops, op)(**arguments)
    for name, value in kept.items():
        assert arguments[name].equal(value), f"{name} was written"
    return str(caught.value)


@pytest.mark.parametrize(("op", "name", "spoil", "part"), MISUSE)
def test_misuse_is_refused_alike_on_both_devices(op, name, spoil, part):
    import re

    import torch

    messages = []
    for device in ("cpu", "cuda"):
        arguments = ARGUMENTS[op](device)
        wrong = spoil(arguments.get(name))
        if isinstance(wrong, list):
            wrong = torch.tensor(wrong, device=device)
        messages.append(refusal(op, arguments | {name: wrong}))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{op}: ")
    assert "expected" in messages[0]
    assert re.search(part, messages[0])


@pytest.mark.parametrize("op", ARGUMENTS)
def test_tensors_of_two_devices_are_refused_by_name(op):
    on_cpu, on_cuda = ARGUMENTS[op]("cpu"), ARGUMENTS[op]("cuda")
    for base, other in ((on_cuda, on_cpu), (on_cpu, on_cuda)):
        for name in base:
            message = refusal(op, base | {name: other[name]})
            assert message.startswith(f"{op}: ")
            assert "cuda:0" in message
            assert "cpu" in message


@pytest.mark.parametrize("op", ["rms_norm", "silu_mul", "linear"])
def test_an_operation_without_a_cuda_kernel_says_so(op):
    import torch

    arguments = {
        "rms_norm": lambda: ops.rms_norm(torch.ones(2, 8).cuda(), torch.ones(8).cuda(), eps=1e-5),
        "silu_mul": lambda: ops.silu_mul(torch.ones(2, 8).cuda()),
        "linear": lambda: ops.linear(torch.ones(2, 8).cuda(), torch.ones(4, 8).cuda()),
    }
    with pytest.raises(RuntimeError, match=f"{op}: tensors are on a CUDA device"):
        arguments[op]()
