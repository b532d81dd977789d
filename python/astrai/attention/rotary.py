"""Rotary position embedding: a differentiable path in torch, the fused kernel elsewhere."""

from __future__ import annotations

import torch

from astrai.extension import ops
from astrai.extension.devices import has_kernels

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def apply_rotary_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k by the angles of their positions.

    q          [T, Hq, D] floating
    k          [T, Hkv, D], the dtype of q
    positions  [T] int32 or int64, each in [0, max_position)
    cos_sin    [max_position, R] float32: cosines in [:, :R/2], sines in [:, R/2:]; R is even, <= D
    interleaved  False: lanes (i, i + R/2) form a pair; True: lanes (2i, 2i + 1)
    Returns    (q, k) rotated; lanes from R on are unchanged. Use the returned tensors: while
               gradients are enabled and q or k requires them, they are new (a complex
               multiplication in torch, with gradients to q and k); otherwise, where the fused
               kernel serves the device, q and k themselves, rotated in place.
    Raises     ValueError: a shape, dtype or device differs, or, on the CPU, a position lies
               outside the table
    Source     Su et al. 2021, arXiv:2104.09864
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return rotate(q, k, positions, cos_sin, interleaved=interleaved)
    if q.dtype in _KERNEL_DTYPES and has_kernels(q.device):
        ops.rotary(q, k, positions, cos_sin, interleaved=interleaved)
        return q, k
    return rotate(q, k, positions, cos_sin, interleaved=interleaved)


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_emb in torch alone: new tensors, differentiable, any device."""
    _check(q, k, positions, cos_sin)
    width = cos_sin.shape[1]
    if width == 0:
        return q, k
    cos, sin = cos_sin[positions.long()].chunk(2, dim=1)
    turns = torch.complex(cos, sin)[:, None]  # [T, 1, R / 2]
    return _turn(q, turns, width, interleaved), _turn(k, turns, width, interleaved)


def _turn(x: torch.Tensor, turns: torch.Tensor, width: int, interleaved: bool) -> torch.Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    lanes = x[..., :width].to(wide)
    if interleaved:
        pairs = lanes.reshape(*lanes.shape[:-1], width // 2, 2)
    else:
        pairs = lanes.reshape(*lanes.shape[:-1], 2, width // 2).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    if not interleaved:
        turned = turned.transpose(-1, -2)
    turned = turned.flatten(-2).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def _check(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    op = "apply_rotary_emb"
    num_tokens, width = q.shape[0], q.shape[-1]
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 3 or tensor.shape[0] != num_tokens or tensor.shape[2] != width:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}; "
                f"expected [T, heads, D], alike in q and k"
            )
    if k.dtype != q.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"{op}: q is {q.dtype} and k {k.dtype}; expected one floating dtype")
    if tuple(positions.shape) != (num_tokens,) or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: positions is {positions.dtype} {list(positions.shape)}; "
            f"expected int32 or int64 [{num_tokens}]"
        )
    if cos_sin.dim() != 2 or cos_sin.dtype != torch.float32:
        raise ValueError(
            f"{op}: cos_sin is {cos_sin.dtype} {list(cos_sin.shape)}; "
            "expected float32 [max_position, R]"
        )
    if cos_sin.shape[1] % 2 != 0 or cos_sin.shape[1] > width:
        raise ValueError(
            f"{op}: cos_sin has width {cos_sin.shape[1]}; expected even and at most {width}"
        )
    # On other devices the check would wait for the device; there the indexing itself traps.
    if positions.device.type == "cpu" and num_tokens > 0:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= cos_sin.shape[0]:
            raise ValueError(
                f"{op}: positions from {low} to {high}; "
                f"expected them from 0 to {cos_sin.shape[0] - 1}"
            )
