"""Norm, activation, rotary, linear and cache write against definitions in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from astrai.extension import ops
from astrai.extension.loader import load

DTYPES = ["float32", "float16", "bfloat16"]
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture(params=load().supported_isas())
def isa(request) -> Iterator[str]:
    """Every instruction set that this machine can run."""
    before = load().cpu_isa()
    load().force_isa(request.param)
    yield request.param
    load().force_isa(before)


def normal(*shape, dtype="float32", seed=0):
    """A torch tensor of random values and the same values in float64."""
    import torch

    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    tensor = torch.from_numpy(values).to(getattr(torch, dtype))
    return tensor, tensor.double().numpy()


def close(actual, expected, dtype):
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=tolerance, atol=tolerance)


# ---- rms_norm ---------------------------------------------------------------------------------


def norm_of(h, weight, eps, offset):
    return h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * (offset + weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 576), (5, 33)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(isa, shape, dtype, offset):
    x, x_exact = normal(*shape, dtype=dtype)
    weight, weight_exact = normal(shape[1], dtype=dtype, seed=1)
    out = ops.rms_norm(x, weight, eps=1e-5, weight_offset=offset)
    assert out.dtype == x.dtype
    close(out, norm_of(x_exact, weight_exact, 1e-5, offset), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_in_place(isa, dtype):
    x, x_exact = normal(4, 64, dtype=dtype)
    residual, residual_exact = normal(4, 64, dtype=dtype, seed=2)
    weight, weight_exact = normal(64, dtype=dtype, seed=1)
    kept = x.clone()
    out = ops.rms_norm(x, weight, eps=1e-5, residual=residual)
    close(residual, x_exact + residual_exact, dtype)
    close(out, norm_of(residual.double().numpy(), weight_exact, 1e-5, 0.0), dtype)
    assert x.equal(kept)


def test_rms_norm_takes_strided_rows_and_may_write_x():
    wide, _ = normal(6, 100)
    x = wide[::2, 10:74]
    weight, weight_exact = normal(64, seed=1)
    expected = norm_of(x.double().numpy(), weight_exact, 1e-6, 0.0)
    kept = wide.clone()
    assert ops.rms_norm(x, weight, eps=1e-6, out=x) is x
    close(x, expected, "float32")
    kept[::2, 10:74] = x
    assert wide.equal(kept)


# ---- silu_mul ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 512])
def test_silu_mul(isa, columns, dtype):
    gate_up, exact = normal(5, 2 * columns, dtype=dtype)
    gate, up = exact[:, :columns], exact[:, columns:]
    out = ops.silu_mul(gate_up)
    assert out.dtype == gate_up.dtype
    close(out, gate / (1 + np.exp(-gate)) * up, dtype)


def test_silu_mul_survives_extreme_gates(isa):
    import torch

    gate = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30]])
    out = ops.silu_mul(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))
    assert torch.equal(out, torch.tensor([[0.0, 0.0, 0.0, 400.0, 2e30]]))


# ---- linear -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 37])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 33), (70, 576), (129, 48)])
def test_linear(isa, rows, outputs, inputs, dtype):
    x, x_exact = normal(rows, inputs, dtype=dtype)
    weight, weight_exact = normal(outputs, inputs, dtype=dtype, seed=1)
    bias, bias_exact = normal(outputs, dtype=dtype, seed=2)
    scale = np.sqrt(inputs)
    expected = x_exact @ weight_exact.T
    out = ops.linear(x, weight)
    assert (out.dtype, tuple(out.shape)) == (x.dtype, (rows, outputs))
    close(out / scale, expected / scale, dtype)
    close(ops.linear(x, weight, bias) / scale, (expected + bias_exact) / scale, dtype)


def test_linear_mixes_float32_rows_with_narrow_weights(isa):
    import torch

    x, x_exact = normal(3, 64)
    weight, weight_exact = normal(40, 64, dtype="bfloat16", seed=1)
    out = ops.linear(x, weight)
    assert out.dtype == torch.float32
    close(out / 8, x_exact @ weight_exact.T / 8, "float32")
    logits = torch.empty(3, 40)
    narrow = x.bfloat16()
    ops.linear(narrow, weight, out=logits)
    close(logits / 8, narrow.double().numpy() @ weight_exact.T / 8, "float32")


# ---- rotary -----------------------------------------------------------------------------------


def table(max_position, width, theta=10000.0):
    angles = np.outer(np.arange(max_position), theta ** -(np.arange(0, width, 2) / width))
    return np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32)


def turned(x, positions, cos_sin, interleaved):
    width = cos_sin.shape[1]
    cos, sin = np.split(cos_sin.astype(np.float64)[positions][:, None], 2, axis=2)
    first = slice(0, width, 2) if interleaved else slice(0, width // 2)
    second = slice(1, width, 2) if interleaved else slice(width // 2, width)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 32, 64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_rotary(isa, width, interleaved, dtype, index):
    fused, exact = normal(7, 5, 64, dtype=dtype)
    q, k = fused[:, :4], fused[:, 4:]
    positions = np.array([0, 5, 1, 99, 3, 3, 42], index)
    cos_sin = table(100, width)
    before = fused.clone()
    assert ops.rotary(q, k, positions, cos_sin, interleaved=interleaved) is None
    close(fused, turned(exact, positions, cos_sin, interleaved), dtype)
    assert fused[..., width:].equal(before[..., width:])


def test_rotary_values_of_a_narrow_width():
    q = np.zeros((1, 3, 32), np.float32)
    q[0, 0, 0] = q[0, 1, 1] = q[0, 2, 5] = 1.0
    ops.rotary(q, None, np.array([3], np.int32), table(4, 4))
    np.testing.assert_allclose(q[0, 0, [0, 2]], [-0.989992, 0.141120], atol=1e-6)
    np.testing.assert_allclose(q[0, 1, [1, 3]], [0.999550, 0.029996], atol=1e-6)
    assert q[0, 2].tolist() == [0.0] * 5 + [1.0] + [0.0] * 26


@pytest.mark.parametrize("position", [-1, 100])
def test_rotary_refuses_positions_outside_the_table(position):
    q = np.ones((2, 1, 32), np.float32)
    with pytest.raises(ValueError, match="rotary: positions"):
        ops.rotary(q, None, np.array([0, position]), table(100, 32))
    assert (q == 1).all()


# ---- kv_write ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_touches_only_its_slots(isa, dtype):
    import torch

    k, _ = normal(4, 3, 32, dtype=dtype)
    v, _ = normal(4, 3, 32, dtype=dtype, seed=1)
    k_pages = torch.full((5, 4, 3, 32), 7.0, dtype=k.dtype)
    v_pages = torch.full((5, 4, 3, 32), 8.0, dtype=k.dtype)
    slots = torch.tensor([5, -1, 9, 19])
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    for row, slot in ((0, 5), (2, 9), (3, 19)):
        expected_k[slot // 4, slot % 4], expected_v[slot // 4, slot % 4] = k[row], v[row]
    assert ops.kv_write(k, v, k_pages, v_pages, slots) is None
    assert k_pages.equal(expected_k)
    assert v_pages.equal(expected_v)


@pytest.mark.parametrize("slot", [-2, 20])
def test_kv_write_refuses_slots_outside_the_cache(slot):
    pages = np.zeros((5, 4, 1, 32), np.float32)
    k = np.ones((2, 1, 32), np.float32)
    with pytest.raises(ValueError, match="kv_write: slot_mapping"):
        ops.kv_write(k, k, pages, pages.copy(), np.array([0, slot]))
    assert not pages.any()


# ---- rotary and kv_write in one pass ----------------------------------------------------------


def rotary_write_arguments(dtype="float32", width=32):
    """q, k, v as views of one fused projection, positions, table, pages, slots with one skipped."""
    import torch

    fused, exact = normal(4, 8, 64, dtype=dtype)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    pages = [torch.full((3, 4, 2, 64), fill, dtype=fused.dtype) for fill in (7.0, 8.0)]
    positions, slots = torch.tensor([2, 0, 9, 5]), torch.tensor([5, -1, 9, 0])
    return (q, k, v, positions, torch.from_numpy(table(10, width)), *pages, slots), fused, exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_kv_write_is_both(isa, interleaved, dtype):
    arguments, fused, exact = rotary_write_arguments(dtype)
    positions, cos_sin, k_pages, v_pages, slots = arguments[3:]
    assert ops.rotary_kv_write(*arguments, interleaved=interleaved) is None
    wanted = turned(exact, positions.numpy(), cos_sin.numpy(), interleaved)
    wanted[:, 6:] = exact[:, 6:]
    close(fused, wanted, dtype)
    written = [slot for slot in slots.tolist() if slot >= 0]
    for pages, heads, fill in ((k_pages, fused[:, 4:6], 7.0), (v_pages, fused[:, 6:], 8.0)):
        flat = pages.flatten(0, 1)
        assert flat[written].equal(heads[slots >= 0])
        others = [slot for slot in range(12) if slot not in written]
        assert (flat[others] == fill).all()


def test_rotary_kv_write_refuses_before_it_touches_anything():
    for place, value, message in (
        (3, [2, 0, 10, 5], "positions.2. is 10; expected 0 to 9"),
        (7, [5, -1, 12, 0], "slot_mapping.2. is 12; expected -1"),
        (7, [5, -1, 9], "slot_mapping has"),
    ):
        arguments, fused, _ = rotary_write_arguments()
        changed = list(arguments)
        changed[place] = np.array(value)
        kept = fused.clone()
        with pytest.raises(ValueError, match="rotary_kv_write: " + message):
            ops.rotary_kv_write(*changed)
        assert fused.equal(kept)
        assert (arguments[5] == 7.0).all()
    arguments, _, _ = rotary_write_arguments()
    changed = list(arguments)
    changed[2] = arguments[1]  # the values would be turned
    with pytest.raises(ValueError, match=r"rotary_kv_write: .*overlap"):
        ops.rotary_kv_write(*changed)


# ---- bad arguments ----------------------------------------------------------------------------


def f32(*shape):
    return np.ones(shape, np.float32)


def f16(*shape):
    return np.ones(shape, np.float16)


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("rms_norm", (f32(2, 8), f32(7)), "weight"),
        ("rms_norm", (f32(2, 8), f16(8)), "float16"),
        ("rms_norm", (f32(2, 8, 2)[..., 0], f32(8)), "stride"),
        ("rms_norm", (f32(8), f32(8)), "x has shape"),
        ("silu_mul", (f32(2, 7),), "gate_up"),
        ("silu_mul", (np.ones((2, 8), np.int32),), "int32"),
        ("linear", (f32(2, 8), f32(4, 7)), "weight"),
        ("linear", (f16(2, 8), f32(4, 8)), "float"),
        ("linear", (f32(2, 8), f32(4, 8), f32(5)), "bias"),
        ("linear", (f32(2, 8), f32(8)), "weight has shape"),
        ("rotary", (f32(2, 1, 32), None, np.zeros(3, np.int32), f32(4, 32)), "positions"),
        ("rotary", (f32(2, 1, 32), None, f32(2), f32(4, 32)), "positions"),
        ("rotary", (f32(2, 1, 32), None, np.zeros(2, np.int32), f32(4, 31)), "cos_sin"),
        ("rotary", (f32(2, 1, 32), None, np.zeros(2, np.int32), f32(4, 34)), "cos_sin"),
        ("rotary", (f32(2, 1, 32), f32(3, 1, 32), np.zeros(2, np.int32), f32(4, 32)), "k"),
        ("kv_write", (f32(2, 1, 32), f32(1, 1, 32), *[f32(1, 4, 1, 32)] * 2, [0, 1]), "v has"),
        (
            "kv_write",
            (f32(2, 1, 32), f32(2, 1, 32), *[f32(1, 4, 2, 32)] * 2, [0, 1]),
            "heads|shape",
        ),
        ("kv_write", (*[f32(2, 1, 32)] * 2, *[f32(1, 4, 1, 32)] * 2, [0]), "slot_mapping"),
    ],
)
def test_bad_arguments(op, arguments, message):
    arguments = [np.array(value) if isinstance(value, list) else value for value in arguments]
    before = [None if value is None else value.copy() for value in arguments]
    options = {"eps": 1e-5} if op == "rms_norm" else {}
    with pytest.raises(ValueError, match=message) as caught:
        getattr(ops, op)(*arguments, **options)
    assert str(caught.value).startswith(f"{op}: ")
    assert "expected" in str(caught.value)
    for value, kept in zip(arguments, before, strict=True):
        np.testing.assert_array_equal(value, kept)


def test_bad_out_and_eps():
    x, weight = f32(2, 8), f32(8)
    for out in (f32(2, 7), f16(2, 8), f32(2, 8, 2)[..., 0]):
        with pytest.raises(ValueError, match="rms_norm: out"):
            ops.rms_norm(x, weight, eps=1e-5, out=out)
        assert (out == 1).all()
    for eps in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="rms_norm: eps"):
            ops.rms_norm(x, weight, eps=eps)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_nothing_to_do_is_no_error(library):
    """Tensors without elements, whose strides libraries set as they like."""

    def zeros(*shape, dtype="float32"):
        import torch

        made = np.zeros(shape, dtype)
        return made if library == "numpy" else torch.from_numpy(made.copy())

    assert tuple(ops.rms_norm(zeros(0, 64), zeros(64), eps=1e-5).shape) == (0, 64)
    assert tuple(ops.silu_mul(zeros(0, 8)).shape) == (0, 4)
    assert tuple(ops.linear(zeros(0, 8), zeros(3, 8)).shape) == (0, 3)
    assert tuple(ops.linear(zeros(2, 8), zeros(0, 8)).shape) == (2, 0)
    ops.rotary(zeros(0, 2, 8), zeros(0, 1, 8), zeros(0, dtype="int64"), zeros(4, 8))
    pages, more_pages = zeros(2, 4, 1, 32), zeros(2, 4, 1, 32)
    ops.kv_write(zeros(0, 1, 32), zeros(0, 1, 32), pages, more_pages, zeros(0, dtype="int64"))
    none = zeros(0, dtype="int32")
    out, lse = ops.attn_paged_decode(
        zeros(2, 2, 32),
        pages,
        pages,
        zeros(3, dtype="int32"),
        none,
        zeros(2, dtype="int32"),
        return_lse=True,
    )
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()
    out = ops.attn_paged_decode(zeros(0, 2, 32), pages, pages, zeros(1, dtype="int32"), none, none)
    assert tuple(out.shape) == (0, 2, 32)
    keys, values = zeros(1, 5, 1, 32), zeros(1, 5, 1, 32)
    assert tuple(ops.attn_prefill(zeros(1, 0, 2, 32), keys, values).shape) == (1, 0, 2, 32)
