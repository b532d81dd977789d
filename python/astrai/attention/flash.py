"""Attention by the flash-attn package (optional extra `flash`), imported only when it is asked for.

Source: Dao 2023, arXiv:2307.08691; the package aligns causal limits and windows with the last key,
which is how rows of a cache stand, and which dense calls are cut to.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from astrai.attention.base import ATTN_BACKEND, AttentionBackend, check_paged_options
from astrai.attention.torch_native import check_dense, check_options

if TYPE_CHECKING:
    from astrai.kv_cache import KVCache

_MIN_VERSION = (2, 6)
_MIN_CAPABILITY = (8, 0)
# The package reads pages in place only in multiples of this many tokens.
_PAGE_GRANULARITY = 256


class Availability(NamedTuple):
    """Whether flash-attn can be used here; `reason` says why not, and is empty if it can."""

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available


@lru_cache(maxsize=1)
def flash_attn_available() -> Availability:
    """Whether flash-attn is installed and works on CUDA device 0.

    Checks the package, the device and its compute capability, then runs one real kernel. The
    answer is found once a process.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return Availability(False, "flash-attn is not installed (pip install 'astrai[flash]')")
    if not torch.cuda.is_available():
        return Availability(False, "flash-attn needs a CUDA device and torch sees none")
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (_MIN_CAPABILITY, capability))
        return Availability(
            False, f"flash-attn needs compute capability {needed}; the device has {found}"
        )
    try:
        version = _package().__version__
        if _version_numbers(version) < _MIN_VERSION:
            return Availability(False, f"flash-attn {version} is installed; 2.6 or later is needed")
        probe = torch.zeros(1, 16, 1, 64, device="cuda", dtype=torch.float16)
        _package().flash_attn_func(probe, probe, probe, causal=True)
        torch.cuda.synchronize()
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        return Availability(False, f"flash-attn is installed but does not run: {error}")
    return Availability(True, "")


def _package() -> Any:
    return importlib.import_module("flash_attn")


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


class FlashAttnBackend(AttentionBackend):
    """flash-attn >= 2.6: no masks, no sinks, dense causal rows that end within the keys."""

    kind = ATTN_BACKEND.FLASH
    devices = frozenset({"cuda"})
    dtypes = frozenset({torch.float16, torch.bfloat16})
    head_dims = frozenset(range(8, 257, 8))

    @classmethod
    def unavailable_reason(cls, device: torch.device | str | None = None) -> str | None:
        return flash_attn_available().reason or None

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
        _check_features(op, mask, sinks, window, softcap)
        if kv is None:
            return _dense(op, q, k, v, causal_offset, window, softcap, scale)
        check_paged_options(op, causal_offset)
        kv.write(layer_id, k, v)
        if kv.page_size % _PAGE_GRANULARITY != 0:
            return _gathered(q, kv, layer_id, window, softcap, scale)
        out: torch.Tensor = _package().flash_attn_with_kvcache(
            q[:, None],
            kv.k_pages[layer_id],
            kv.v_pages[layer_id],
            cache_seqlens=kv.step.kv_lens,
            block_table=_block_table(kv),
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window, causal=True),
            softcap=softcap,
        )
        return out[:, 0]

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
        _check_features(op, mask, sinks, window, softcap)
        if kv is None:
            return _dense(op, q, k, v, causal_offset, window, softcap, scale)
        check_paged_options(op, causal_offset)
        kv.write(layer_id, k, v)
        if kv.page_size % _PAGE_GRANULARITY != 0:
            return _gathered(q, kv, layer_id, window, softcap, scale)
        step = kv.step
        out: torch.Tensor = _package().flash_attn_varlen_func(
            q,
            kv.k_pages[layer_id],
            kv.v_pages[layer_id],
            cu_seqlens_q=step.qo_indptr,
            cu_seqlens_k=_cumulative(step.kv_lens),
            max_seqlen_q=step.max_q_len,
            max_seqlen_k=step.max_kv_len,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window, causal=True),
            softcap=softcap,
            block_table=_block_table(kv),
        )
        return out


def _check_features(
    op: str,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: int,
    softcap: float,
) -> None:
    for name, tensor in (("mask", mask), ("sinks", sinks)):
        if tensor is not None:
            raise ValueError(f"{op}: {name} given; expected None (flash-attn has no {name})")
    check_options(op, window, softcap)


def _window_size(window: int, *, causal: bool) -> tuple[int, int]:
    """Keys to the left and to the right of a row, itself excluded; -1 = no limit."""
    return (window - 1 if window > 0 else -1, 0 if causal else -1)


def _dense(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal_offset: int,
    window: int,
    softcap: float,
    scale: float | None,
) -> torch.Tensor:
    check_dense(op, q, k, v)
    causal = causal_offset >= 0
    if causal:
        needed = causal_offset + q.shape[1]
        if needed > k.shape[1]:
            raise ValueError(
                f"{op}: causal_offset {causal_offset} with {q.shape[1]} queries and "
                f"{k.shape[1]} keys; expected the last query at a key (flash-attn)"
            )
        # Nobody sees the keys after the last query; without them the two ends align.
        k, v = k[:, :needed], v[:, :needed]
    out: torch.Tensor = _package().flash_attn_func(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=causal,
        window_size=_window_size(window, causal=causal),
        softcap=softcap,
    )
    return out


def _gathered(
    q: torch.Tensor,
    kv: KVCache,
    layer_id: int,
    window: int,
    softcap: float,
    scale: float | None,
) -> torch.Tensor:
    """Keys and values of all requests copied end to end, for page sizes that flash-attn lacks."""
    step = kv.step
    pages, offsets, cumulative = _packed_places(kv)
    out: torch.Tensor = _package().flash_attn_varlen_func(
        q,
        kv.k_pages[layer_id][pages, offsets],
        kv.v_pages[layer_id][pages, offsets],
        cu_seqlens_q=step.qo_indptr,
        cu_seqlens_k=cumulative,
        max_seqlen_q=step.max_q_len,
        max_seqlen_k=step.max_kv_len,
        softmax_scale=scale,
        causal=True,
        window_size=_window_size(window, causal=True),
        softcap=softcap,
    )
    return out


def _packed_places(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page and offset of every key, request after request, and the prefix sums of kv_lens."""
    step = kv.step
    known: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = step.cache.get("flash.packed")
    if known is not None:
        return known
    cumulative = _cumulative(step.kv_lens)
    total = sum(step.host_kv_lens)
    lens = step.kv_lens.long()
    owners = torch.repeat_interleave(
        torch.arange(lens.shape[0], device=lens.device), lens, output_size=total
    )
    keys = torch.arange(total, device=lens.device) - cumulative[owners]
    pages = step.kv_indices[step.kv_indptr[owners] + keys // kv.page_size].long()
    result = (pages, keys % kv.page_size, cumulative)
    step.cache["flash.packed"] = result
    return result


def _block_table(kv: KVCache) -> torch.Tensor:
    """int32 [B, pages of the longest request]; entries past a request's own pages are 0."""
    step = kv.step
    known: torch.Tensor | None = step.cache.get("flash.block_table")
    if known is not None:
        return known
    width = -(-step.max_kv_len // kv.page_size)
    columns = torch.arange(width, device=step.kv_lens.device)
    starts, ends = step.kv_indptr[:-1, None], step.kv_indptr[1:, None]
    entries = starts + columns
    owned = entries < ends
    table = torch.where(owned, step.kv_indices[torch.where(owned, entries, 0)], 0)
    table = table.to(torch.int32)
    step.cache["flash.block_table"] = table
    return table


def _cumulative(lens: torch.Tensor) -> torch.Tensor:
    """int32 [B + 1]: 0, then the running sums."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
