"""apply_rotary_emb: the differentiable path, the fused one, and that they agree."""

from __future__ import annotations

import pytest

from astrai.extension import ops


def table(max_position, width):
    import torch

    angles = torch.outer(
        torch.arange(max_position, dtype=torch.float64),
        10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / max(width, 1)),
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def inputs(dtype, width=16, **options):
    import torch

    torch.manual_seed(0)
    q, k = (torch.randn(5, heads, width).to(dtype) for heads in (4, 2))
    return q.requires_grad_(**options), k.requires_grad_(**options)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [4, 16])
def test_gradients_of_q_and_k(interleaved, width):
    import torch

    from astrai.attention import apply_rotary_emb

    positions, cos_sin = torch.tensor([0, 3, 1, 7, 7]), table(8, width)
    q, k = inputs(torch.float64)

    def run(q, k):
        return apply_rotary_emb(q, k, positions, cos_sin, interleaved=interleaved)

    assert torch.autograd.gradcheck(run, (q, k))
    kept = q.detach().clone()
    rotated, _ = run(q, k)
    assert q.detach().equal(kept)
    assert rotated[..., width:].equal(q[..., width:])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 16])
def test_both_paths_agree(dtype, interleaved, width):
    import torch

    from astrai.attention import apply_rotary_emb

    positions, cos_sin = torch.tensor([0, 3, 1, 99, 7], dtype=torch.int32), table(100, width)
    q, k = inputs(getattr(torch, dtype))
    expected = apply_rotary_emb(q, k, positions, cos_sin, interleaved=interleaved)
    with torch.no_grad():
        fused = q.clone(), k.clone()
        result = apply_rotary_emb(*fused, positions, cos_sin, interleaved=interleaved)
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for got, given, wanted in zip(result, fused, expected, strict=True):
        assert got is given
        torch.testing.assert_close(got, wanted.detach(), rtol=tolerance, atol=tolerance)


def test_tensors_without_gradients_take_the_kernel_while_gradients_are_enabled():
    import torch

    from astrai.attention import apply_rotary_emb

    q, k = inputs(torch.float32, requires_grad=False)
    wanted = q.clone()
    ops.rotary(wanted, None, torch.arange(5), table(8, 16))
    rotated, _ = apply_rotary_emb(q, k, torch.arange(5), table(8, 16))
    assert rotated is q
    assert q.equal(wanted)


def test_float64_without_gradients_is_served_by_torch():
    import torch

    from astrai.attention import apply_rotary_emb

    q, k = inputs(torch.float64, requires_grad=False)
    kept = q.clone()
    rotated, _ = apply_rotary_emb(q, k, torch.arange(5), table(8, 16))
    assert q.equal(kept)
    assert rotated.dtype == torch.float64
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": [0, 1, 2, 3, 8]}, "positions"),
        ({"positions": [0, 1, 2, 3, -1]}, "positions"),
        ({"positions": [0, 1]}, "positions"),
        ({"positions": [0.0] * 5}, "positions"),
        ({"width": 18}, "cos_sin"),
        ({"width": 3}, "cos_sin"),
        ({"heads": (3, 16)}, "k"),
    ],
)
def test_bad_arguments(changed, message, grad):
    import torch

    from astrai.attention import apply_rotary_emb

    q, k = inputs(torch.float32, requires_grad=grad)
    if "heads" in changed:
        k = torch.randn(4, 2, 16, requires_grad=grad)
    width = changed.get("width", 16)
    cos_sin = torch.ones(8, width)
    positions = torch.tensor(changed.get("positions", [0, 1, 2, 3, 4]))
    with pytest.raises(ValueError, match=message):
        apply_rotary_emb(q, k, positions, cos_sin)
