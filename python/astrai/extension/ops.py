"""One stateless wrapper per compiled kernel.

Tensors are anything that speaks DLPack: torch tensors, numpy arrays. They are never copied; every
strided view with unit last stride is taken as it is. `out=None` allocates like the input (torch or
numpy); any other kind of tensor needs an explicit `out`. float16 and float32 come from either
library, bfloat16 only from torch. Kernels are not differentiable: a tensor that requires grad is
refused while gradients are enabled.

Symbols: B requests, Lq queries and Lk keys of a dense batch, T rows of all requests together,
Hq query heads, Hkv KV heads (Hq % Hkv == 0), D head dim, P pages of S tokens.

What all functions raise:
  ValueError    a shape, dtype, stride, device or option differs from the contract; the message is
                "<op>: <argument> <found>; expected <rule>", and nothing has been touched
  TypeError     an argument is not a tensor, or not a number
  RuntimeError  tensors are on a CUDA device and this build has no CUDA kernel for the operation or
                no code for the device, or CUDA failed
What only the CPU checks, since CUDA would have to wait for the device: values inside page lists,
lengths, positions and slots.

`stream` is a cudaStream_t as an int. None, the default, is the stream that the tensors' library
currently queues work on: torch's current stream of their device. The CPU ignores it.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any

from astrai.extension.loader import load

if TYPE_CHECKING:
    from astrai.extension.lib import _ext
else:
    _ext = load()

# torch.Tensor, numpy.ndarray or any other DLPack tensor: they share no type.
Tensor = Any

_rms_norm = _ext.rms_norm
_silu_mul = _ext.silu_mul
_rotary = _ext.rotary
_linear = _ext.linear
_kv_write = _ext.kv_write
_rotary_kv_write = _ext.rotary_kv_write
_attn_paged_decode = _ext.attn_paged_decode


def _empty(op: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uninitialised and contiguous, of the library, dtype and device of `like`."""
    new_empty = getattr(like, "new_empty", None)
    if new_empty is not None:
        return new_empty(shape)
    return _numpy(op, like).empty(shape, like.dtype)


def _empty_float32(op: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same in float32."""
    new_empty = getattr(like, "new_empty", None)
    if new_empty is not None:
        import torch

        return new_empty(shape, dtype=torch.float32)
    return _numpy(op, like).empty(shape, "float32")


def _numpy(op: str, like: Tensor) -> Any:
    import numpy as np

    if not isinstance(like, np.ndarray):
        raise TypeError(
            f"{op}: nothing to return into for a {type(like).__name__}; "
            "expected a torch or numpy input, or an explicit out and no return_lse"
        )
    return np


def _shape(op: str, name: str, tensor: Tensor, rule: str, *ranks: int) -> tuple[int, ...]:
    shape = getattr(tensor, "shape", None)
    if shape is None:
        raise TypeError(
            f"{op}: {name} is a {type(tensor).__name__}; "
            "expected a tensor that speaks DLPack (torch, numpy)"
        )
    if len(shape) not in ranks:
        raise ValueError(f"{op}: {name} has shape {list(shape)}; expected {rule}")
    return tuple(shape)


def _swap_heads(op: str, name: str, tensor: Tensor) -> Tensor:
    """[B, H, L, D] seen as [B, L, H, D]: strides change places, nothing moves."""
    _shape(op, name, tensor, "[B, H, L, D]", 4)
    return tensor.swapaxes(1, 2)


# ---- attention --------------------------------------------------------------------------------


def _dense_attention(
    op: str,
    kernel: Callable[..., None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal_offset: int,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    scale: float | None,
    layout: str,
    out: Tensor | None,
    return_lse: bool,
    o_part: Tensor | None,
    ml_part: Tensor | None,
    splits: tuple[int, ...],
    stream: int | None,
) -> Any:
    if layout not in ("blhd", "bhld"):
        raise ValueError(f"{op}: layout {layout!r}; expected 'blhd' or 'bhld'")
    heads_first = layout == "bhld"
    shape = _shape(op, "q", q, "[B, Hq, Lq, D]" if heads_first else "[B, Lq, Hq, D]", 4)
    if out is None:
        out = _empty(op, q, shape)
    lse = None
    if return_lse:
        num_heads, q_len = shape[1:3] if heads_first else (shape[2], shape[1])
        lse = _empty_float32(op, q, (shape[0], num_heads, q_len))
    tensors = (q, k, v, out)
    if heads_first:
        named = zip(("q", "k", "v", "out"), tensors, strict=True)
        tensors = tuple(_swap_heads(op, name, tensor) for name, tensor in named)
    kernel(
        *tensors,
        mask,
        causal_offset,
        window,
        softcap,
        sinks,
        scale,
        lse,
        o_part,
        ml_part,
        *splits,
        stream,
    )
    return (out, lse) if return_lse else out


def attn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal_offset: int = -1,
    window: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    layout: str = "blhd",
    out: Tensor | None = None,
    return_lse: bool = False,
    o_part: Tensor | None = None,
    ml_part: Tensor | None = None,
    num_splits: int = 0,
    fixed_split_keys: int = 0,
    max_kv_len: int = 0,
    stream: int | None = None,
) -> Any:
    """Attention of one query per request over dense keys and values, split over the keys.

    q              [B, 1, Hq, D] float32, float16 or bfloat16; layout="bhld": [B, Hq, 1, D]
    k, v           [B, Lk, Hkv, D], the dtype of q, strides of their own; "bhld": [B, Hkv, Lk, D]
    mask           bool [B, Lk] or [B, 1, Lk], True = keep; applies on top of the causal limit
    causal_offset  -1: not causal; >= 0: position of the query on the key axis, it sees keys <= it
    window         >= 1: the query at position p sees keys j > p - window, where p is causal_offset,
                   or Lk - 1 without a causal limit; -1: no window
    softcap        > 0: scores become softcap * tanh(score / softcap); 0: off
    sinks          float32 [Hq]: one more logit in the denominator, after scale and softcap
    scale          multiplies q.k; default D ** -0.5
    out            as q, in the same layout; allocated when None
    o_part         float32 scratch [>= B, Hq, splits, D], with ml_part [>= B, Hq, splits, 2]; both
                   or neither. Without them the kernel uses scratch of its own
    num_splits     parts that the keys are cut into; 0 lets the kernel choose
    fixed_split_keys  > 0, a multiple of 128: parts of so many keys whatever else is in the batch,
                   so that a request's result has the same bits in any batch; num_splits stays 0
                   then. 0: the fastest parts on CUDA; the CPU's length is always fixed
    max_kv_len     no request has more keys; 0: unknown. On CUDA it bounds the number of fixed parts
    Returns        out, or (out, lse) with return_lse: lse float32 [B, Hq, 1], natural log of the
                   softmax denominator, sink included. A query that sees no key: zeros, lse -inf
    Raises         see the module
    Source         flash-decoding split over KV; online softmax, Milakov and Gimelshein 2018,
                   arXiv:1805.02867
    """
    return _dense_attention(
        "attn_decode",
        _ext.attn_decode,
        q,
        k,
        v,
        mask,
        causal_offset,
        window,
        softcap,
        sinks,
        scale,
        layout,
        out,
        return_lse,
        o_part,
        ml_part,
        (num_splits, fixed_split_keys, max_kv_len),
        stream,
    )


def attn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal_offset: int = -1,
    window: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    layout: str = "blhd",
    out: Tensor | None = None,
    return_lse: bool = False,
    o_part: Tensor | None = None,
    ml_part: Tensor | None = None,
    num_splits: int = 0,
    match_decode: bool = False,
    stream: int | None = None,
) -> Any:
    """Attention of many queries per request over dense keys and values, split over the queries.

    q              [B, Lq, Hq, D] float32, float16 or bfloat16; layout="bhld": [B, Hq, Lq, D]
    mask           bool [B, Lk] or [B, Lq, Lk], True = keep
    causal_offset  -1: not causal; >= 0: position of the first query on the key axis, row i sees
                   keys <= causal_offset + i
    window         >= 1: row i sees keys j > p - window, where p is causal_offset + i, or
                   Lk - Lq + i without a causal limit
    num_splits     0 or 1. On CUDA 0 may divide a row's keys over two groups of warps where the
                   device would be idle otherwise, which shows in the last bits; 1 never does
    match_decode   CPU only: compute every row as attn_decode does, bit for bit; slower
    Returns        out, or (out, lse) with return_lse: lse float32 [B, Hq, Lq]

    Everything else is as in attn_decode. o_part and ml_part are accepted, so that the two calls
    are interchangeable, and checked, but a split over queries has no use for them.
    Source         online softmax over key tiles, Dao et al. 2022, arXiv:2205.14135
    """
    return _dense_attention(
        "attn_prefill",
        _ext.attn_prefill,
        q,
        k,
        v,
        mask,
        causal_offset,
        window,
        softcap,
        sinks,
        scale,
        layout,
        out,
        return_lse,
        o_part,
        ml_part,
        (num_splits, match_decode),
        stream,
    )


def attn_paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor,
    *,
    mask: Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    o_part: Tensor | None = None,
    ml_part: Tensor | None = None,
    num_splits: int = 0,
    fixed_split_keys: int = 0,
    max_kv_len: int = 0,
    stream: int | None = None,
) -> Any:
    """Attention of one new token per request over paged keys and values.

    q                 [B, Hq, D] or [B, 1, Hq, D] float32, float16 or bfloat16
    k_pages, v_pages  [P, S, Hkv, D], the dtype of q; any strides with unit last stride
    kv_indptr         int32 [B + 1]: request b owns kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
    kv_indices        int32, page ids; entries past the last used page of a request are not read
    kv_lens           int32 [B], in tokens; the query sees all of them, within the window
    out               as q; allocated when None
    Returns           out, or (out, lse) with return_lse: lse float32 [B, Hq]. kv_len 0: zeros, -inf

    Options are those of attn_decode, with kv_len in the place of Lk; keys at or past the width of
    a mask are masked out. CUDA cannot read kv_lens:
    without max_kv_len, fixed_split_keys assumes that one request may own all of kv_indices, and
    where a request is longer than max_kv_len its parts are longer too. Raises: see the module.
    Source            flash-decoding split over KV on the page table of Kwon et al. 2023,
                      arXiv:2309.06180
    """
    lse = None
    if out is None or return_lse:
        op = "attn_paged_decode"
        shape = _shape(op, "q", q, "[B, Hq, D] or [B, 1, Hq, D]", 3, 4)
        if out is None:
            out = _empty(op, q, shape)
        if return_lse:
            lse = _empty_float32(op, q, (shape[0], shape[-2]))
    _attn_paged_decode(
        q,
        k_pages,
        v_pages,
        kv_indptr,
        kv_indices,
        kv_lens,
        out,
        mask,
        window,
        softcap,
        sinks,
        scale,
        lse,
        o_part,
        ml_part,
        num_splits,
        fixed_split_keys,
        max_kv_len,
        stream,
    )
    return (out, lse) if return_lse else out


def attn_paged_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor,
    *,
    causal_offset: int | Tensor | None = None,
    mask: Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    o_part: Tensor | None = None,
    ml_part: Tensor | None = None,
    num_splits: int = 0,
    match_decode: bool = False,
    stream: int | None = None,
) -> Any:
    """Attention of ragged queries over paged keys and values.

    q              [T, Hq, D]; request b owns rows qo_indptr[b] : qo_indptr[b + 1], none allowed
    qo_indptr      int32 [B + 1]
    causal_offset  None: the queries of a request are its last tokens, so the first one is at
                   kv_len - q_len and a row before key 0 sees nothing; -1: not causal; int >= 0 or
                   int32 [B]: position of each request's first query on its key axis
    Returns        out, or (out, lse) with return_lse: lse float32 [T, Hq]

    Pages, lengths and options are as in attn_paged_decode, num_splits and match_decode as in
    attn_prefill; a window counts from the row's position,
    kv_len - q_len + i without a causal limit. Raises: see the module.
    """
    lse = None
    if out is None or return_lse:
        op = "attn_paged_prefill"
        shape = _shape(op, "q", q, "[T, Hq, D]", 3)
        if out is None:
            out = _empty(op, q, shape)
        if return_lse:
            lse = _empty_float32(op, q, shape[:2])
    offset, offsets = -1, None
    if isinstance(causal_offset, Integral):
        offset = int(causal_offset)
    elif causal_offset is not None:
        offsets = causal_offset
    _ext.attn_paged_prefill(
        q,
        k_pages,
        v_pages,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_lens,
        out,
        causal_offset is None,
        offset,
        offsets,
        mask,
        window,
        softcap,
        sinks,
        scale,
        lse,
        o_part,
        ml_part,
        num_splits,
        match_decode,
        stream,
    )
    return (out, lse) if return_lse else out


# ---- layers -----------------------------------------------------------------------------------


def rotary(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    stream: int | None = None,
) -> None:
    """Rotary position embedding, in place on q and k.

    q, k       [T, Hq, D] and [T, Hkv, D] float32, float16 or bfloat16, any strides with unit last
               stride; k may be None
    positions  int32 or int64 [T], each in [0, max_position)
    cos_sin    float32 [max_position, R]: cosines in [:, :R/2], sines in [:, R/2:]. R is the rotary
               width, even and <= D; lanes from R on keep their bits
    interleaved  False: lanes (i, i + R/2) form a pair; True: lanes (2i, 2i + 1)
    Raises     see the module; a position outside the table is a ValueError on the CPU
    Source     Su et al. 2021, arXiv:2104.09864
    """
    _rotary(q, k, positions, cos_sin, interleaved, stream)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    weight_offset: float = 0.0,
    stream: int | None = None,
) -> Tensor:
    """h / sqrt(mean(h^2) + eps) * (weight_offset + weight) over the last axis.

    x              [T, N] float32, float16 or bfloat16, rows at any fixed stride
    weight         [N], the dtype of x
    residual       None: h = x. Else [T, N]: it becomes residual + x, in place, rounded to its
                   dtype, and that is h
    out            [T, N], may be x; allocated when None
    weight_offset  1.0 for checkpoints that store weight - 1
    Returns        out. The mean is taken in float32. Raises: see the module
    Source         Zhang and Sennrich 2019, arXiv:1910.07467
    """
    if out is None:
        out = _empty("rms_norm", x, _shape("rms_norm", "x", x, "[T, N]", 2))
    _rms_norm(x, weight, out, residual, eps, weight_offset, stream)
    return out


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None, stream: int | None = None) -> Tensor:
    """silu(first half) * second half of every row: the gate of a SwiGLU layer.

    gate_up  [T, 2 * I] float32, float16 or bfloat16, rows at any fixed stride
    out      [T, I]; allocated when None
    Returns  out. Raises: see the module
    Source   Shazeer 2020, arXiv:2002.05202
    """
    if out is None:
        rows, columns = _shape("silu_mul", "gate_up", gate_up, "[T, 2 * I]", 2)
        out = _empty("silu_mul", gate_up, (rows, columns // 2))
    _silu_mul(gate_up, out, stream)
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """x W^T + bias, summed in float32.

    x        [M, K]: the dtype of weight, or float32
    weight   [N, K] float32, float16 or bfloat16; rows at any fixed stride
    bias     [N], the dtype of weight
    out      [M, N]: the dtype of x, or float32; allocated in the dtype of x when None
    Returns  out. Raises: see the module
    """
    if out is None:
        rows = _shape("linear", "x", x, "[M, K]", 2)[0]
        columns = _shape("linear", "weight", weight, "[N, K]", 2)[0]
        out = _empty("linear", x, (rows, columns))
    _linear(x, weight, bias, out, stream)
    return out


def kv_write(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    *,
    stream: int | None = None,
) -> None:
    """Write new keys and values into their slots of a paged cache.

    k, v              [T, Hkv, D] float32, float16 or bfloat16
    k_pages, v_pages  [P, S, Hkv, D], the dtype of k
    slot_mapping      int64 [T]: page * S + offset of each row; -1 skips the row
    Raises            see the module; a slot outside the cache is a ValueError on the CPU
    """
    _kv_write(k, v, k_pages, v_pages, slot_mapping, stream)


def rotary_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    stream: int | None = None,
) -> None:
    """rotary of q and k, in place, then kv_write of k and v: one pass over the new tokens.

    q, k, v           [T, Hq, D] and twice [T, Hkv, D] float32, float16 or bfloat16
    positions         int32 or int64 [T], each in [0, max_position)
    cos_sin           float32 [max_position, R], as in rotary
    k_pages, v_pages  [P, S, Hkv, D], the dtype of q; nothing that is turned may lie in them
    slot_mapping      int64 [T]: page * S + offset of each row; -1 turns the row and writes nothing
    interleaved       as in rotary
    Raises            see the module; on the CPU also as rotary and kv_write do, before anything
                      has been touched
    """
    _rotary_kv_write(
        q, k, v, positions, cos_sin, interleaved, k_pages, v_pages, slot_mapping, stream
    )
