"""Attention in plain torch: any device, any floating dtype, any head dim.

Dense attention is differentiable. Over a cache, keys and values are gathered with one indexed read
per request (prefill) or for the whole batch (decode), and all masks derive from the lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from astrai.attention.base import ATTN_BACKEND, AttentionBackend, check_paged_options

if TYPE_CHECKING:
    from astrai.kv_cache import KVCache, KVStep

_GATHER = "torch_native.gather"


class TorchNativeBackend(AttentionBackend):
    """Torch's scaled_dot_product_attention, or explicit softmax where it has no such option."""

    kind = ATTN_BACKEND.TORCH_NATIVE

    def fwd_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        kv: KVCache | None = None,
        layer_id: int = 0,
        mask: torch.Tensor | None = None,
        causal_offset: int = -1,
        window: int = -1,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        op = "fwd_decode"
        if kv is None:
            if q.dim() == 4 and q.shape[1] != 1:
                raise ValueError(f"{op}: q has shape {list(q.shape)}; expected [B, 1, Hq, D]")
            return dense_attention(op, q, k, v, mask, causal_offset, window, softcap, sinks, scale)
        check_paged_options(op, causal_offset)
        check_options(op, window, softcap)
        kv.write(layer_id, k, v)
        step = kv.step
        if step.max_kv_len == 0:
            return q.new_zeros(q.shape)
        pages, offsets, seen = _gather_indices(step, kv.page_size)
        keys = kv.k_pages[layer_id][pages, offsets]
        values = kv.v_pages[layer_id][pages, offsets]
        if window > 0:
            reach = step.kv_lens[:, None] - window
            seen = seen & (torch.arange(step.max_kv_len, device=q.device) >= reach)
        if mask is not None:
            rows = mask if mask.dim() == 2 else mask[:, 0]
            seen = seen & _fit_mask(op, rows, step.num_rows, step.max_kv_len)
        out = _attend(
            q[:, :, None],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            seen[:, None, None],
            softcap,
            sinks,
            scale,
        )
        return out[:, :, 0]

    def fwd_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        kv: KVCache | None = None,
        layer_id: int = 0,
        mask: torch.Tensor | None = None,
        causal_offset: int = -1,
        window: int = -1,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        op = "fwd_prefill"
        if kv is None:
            return dense_attention(op, q, k, v, mask, causal_offset, window, softcap, sinks, scale)
        check_paged_options(op, causal_offset)
        check_options(op, window, softcap)
        kv.write(layer_id, k, v)
        step = kv.step
        out = q.new_zeros(q.shape)
        if mask is not None:
            mask = _fit_mask(op, mask, step.num_rows, step.max_kv_len)
        row = 0
        for index, (q_len, kv_len, pages) in enumerate(step.requests()):
            rows = slice(row, row + q_len)
            row += q_len
            if kv_len == 0:
                continue
            keys = kv.k_pages[layer_id][pages].flatten(0, 1)[:kv_len]
            values = kv.v_pages[layer_id][pages].flatten(0, 1)[:kv_len]
            own_mask = None
            if mask is not None:
                own_mask = mask[index : index + 1, ..., :kv_len]
                if own_mask.dim() == 3:
                    own_mask = own_mask[:, :q_len]
            out[rows] = _causal_or_full(
                q[rows].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                own_mask,
                True,
                kv_len - q_len,
                window,
                softcap,
                sinks,
                scale,
            )[0].transpose(0, 1)
        return out


def check_options(op: str, window: int, softcap: float) -> None:
    """Raise ValueError for a window or softcap outside its range."""
    if window != -1 and window < 1:
        raise ValueError(f"{op}: window {window}; expected -1 (none) or at least 1")
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"{op}: softcap {softcap}; expected 0 (none) or a finite value above 0")


def check_dense(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError unless q is [B, Lq, Hq, D] and k, v are [B, Lk, Hkv, D] that fit."""
    if q.dim() != 4:
        raise ValueError(f"{op}: q has shape {list(q.shape)}; expected [B, Lq, Hq, D]")
    batch, _, num_heads, width = q.shape
    if k.dim() != 4 or k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(
            f"{op}: k has shape {list(k.shape)}; expected [{batch}, Lk, Hkv, {width}] to go with q"
        )
    if v.shape != k.shape:
        raise ValueError(f"{op}: v has shape {list(v.shape)}; expected {list(k.shape)} as k")
    if k.shape[2] == 0 or num_heads % k.shape[2] != 0:
        raise ValueError(
            f"{op}: q has {num_heads} heads and k {k.shape[2]}; expected a multiple of k's"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} on {tensor.device}; "
                f"expected {q.dtype} on {q.device} as q"
            )


def _check_mask(op: str, mask: torch.Tensor, batch: int, q_len: int, kv_len: int) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"{op}: mask has dtype {mask.dtype}; expected torch.bool")
    if tuple(mask.shape) not in ((batch, kv_len), (batch, q_len, kv_len)):
        raise ValueError(
            f"{op}: mask has shape {list(mask.shape)}; "
            f"expected [{batch}, {kv_len}] or [{batch}, {q_len}, {kv_len}]"
        )


def dense_attention(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal_offset: int,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Differentiable attention of q [B, Lq, Hq, D] over k, v [B, Lk, Hkv, D] -> [B, Lq, Hq, D]."""
    check_dense(op, q, k, v)
    check_options(op, window, softcap)
    if causal_offset < -1:
        raise ValueError(f"{op}: causal_offset {causal_offset}; expected -1 (none) or at least 0")
    q_len, kv_len = q.shape[1], k.shape[1]
    if mask is not None:
        _check_mask(op, mask, q.shape[0], q_len, kv_len)
    if sinks is not None and tuple(sinks.shape) != (q.shape[2],):
        raise ValueError(f"{op}: sinks has shape {list(sinks.shape)}; expected [{q.shape[2]}]")
    if q.numel() == 0 or kv_len == 0:
        return q.new_zeros(q.shape)
    out = _causal_or_full(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask,
        causal_offset >= 0,
        causal_offset if causal_offset >= 0 else kv_len - q_len,
        window,
        softcap,
        sinks,
        scale,
    )
    return out.transpose(1, 2)


def _causal_or_full(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    first_position: int,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Heads-first attention; row i stands at first_position + i on the key axis."""
    q_len = q.shape[2]
    if causal:
        # No row sees past the last one's position, and what nobody sees may hold anything.
        kv_len = min(k.shape[2], first_position + q_len)
        if kv_len <= 0:
            return q.new_zeros(q.shape)
        k, v = k[:, :, :kv_len], v[:, :, :kv_len]
        if mask is not None:
            mask = mask[..., :kv_len]
    kv_len = k.shape[2]
    limited = causal and first_position < kv_len - 1
    if mask is None and window < 1 and softcap == 0.0 and sinks is None:
        if not limited:
            return _attend(q, k, v, None, softcap, sinks, scale)
        if first_position == 0:
            k, v = (_repeat_heads(tensor, q.shape[1]) for tensor in (k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    positions = first_position + torch.arange(q_len, device=q.device)[:, None]
    keys = torch.arange(kv_len, device=q.device)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
    if limited:
        seen = seen & (keys <= positions)
    if window > 0:
        seen = seen & (keys > positions - window)
    if mask is not None:
        seen = seen & (mask if mask.dim() == 3 else mask[:, None])
    seen = seen.unsqueeze(-3)  # heads
    return _attend(q, k, v, seen, softcap, sinks, scale)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    softcap: float,
    sinks: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """q [B, Hq, Lq, D], k and v [B, Hkv, Lk, D], seen bool, broadcast to [B, 1, Lq, Lk].

    Keys that no row sees are zeroed first: weight 0 times NaN would be NaN.
    """
    blind = None
    if seen is not None:
        unseen = ~seen.any(-2)[..., None]
        if unseen.dim() == 3:
            unseen = unseen[None]
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        blind = ~seen.any(-1, keepdim=True)
        seen = seen | blind  # a softmax over nothing is NaN, in its gradient too
    if softcap == 0.0 and sinks is None:
        out = _sdpa(q, k, v, seen, scale)
    else:
        out = _explicit(q, k, v, seen, softcap, sinks, scale)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    batch, num_heads, q_len, width = q.shape
    num_kv_heads = k.shape[1]
    if q_len == 1 and num_heads != num_kv_heads:
        # The heads of a group are rows of one small matrix: nothing has to be repeated.
        grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, width)
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=seen, scale=scale)
        return out.reshape(batch, num_heads, 1, width)
    k, v = (_repeat_heads(tensor, num_heads) for tensor in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    softcap: float,
    sinks: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    batch, num_heads, q_len, width = q.shape
    num_kv_heads = k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(wide).reshape(batch, num_kv_heads, -1, q_len, width)
    scores = grouped @ k.to(wide)[:, :, None].transpose(-1, -2)
    scores = scores * (width**-0.5 if scale is None else scale)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen.unsqueeze(-3), float("-inf"))
    if sinks is not None:
        column = sinks.to(wide).view(1, num_kv_heads, -1, 1, 1)
        column = column.expand(batch, -1, -1, q_len, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = weights @ v.to(wide)[:, :, None]
    return out.reshape(batch, num_heads, q_len, width).to(q.dtype)


def _repeat_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, Hkv, L, D] -> [B, Hq, L, D], each head repeated for its group."""
    ratio = num_heads // tensor.shape[1]
    return tensor if ratio == 1 else tensor.repeat_interleave(ratio, dim=1)


def _gather_indices(
    step: KVStep, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page and offset of every (request, key) [B, max_kv_len], and whether the key exists.

    All layers of a step read the same places, so this is done once a step.
    """
    known: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = step.cache.get(_GATHER)
    if known is not None:
        return known
    keys = torch.arange(step.max_kv_len, device=step.kv_lens.device)
    seen = keys < step.kv_lens[:, None]
    entries = step.kv_indptr[:-1, None].long() + keys // page_size
    entries = torch.where(seen, entries, 0)
    pages = torch.where(seen, step.kv_indices[entries].long(), 0)
    result = (pages, (keys % page_size).expand_as(pages), seen)
    step.cache[_GATHER] = result
    return result


def _fit_mask(op: str, mask: torch.Tensor, num_rows: int, max_kv_len: int) -> torch.Tensor:
    """The mask cut or, with False, extended to max_kv_len keys."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{op}: mask has dtype {mask.dtype}; expected torch.bool")
    if mask.dim() not in (2, 3) or mask.shape[0] != num_rows:
        raise ValueError(
            f"{op}: mask has shape {list(mask.shape)}; "
            f"expected [{num_rows}, Lk] or [{num_rows}, Lq, Lk]"
        )
    missing = max_kv_len - mask.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(mask, (0, missing), value=False)
    return mask[..., :max_kv_len]
