"""What the CPU and the CUDA backend share: calls on the compiled kernels.

The host entry points switch on the tensors' device, so both backends issue the same calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from astrai.attention.base import AttentionBackend, check_paged_options
from astrai.extension import ops
from astrai.extension.loader import load

if TYPE_CHECKING:
    from astrai.kv_cache import KVCache


class KernelBackend(AttentionBackend):
    """Attention by this project's kernels; without gradients."""

    head_dims = frozenset(load().attn_head_dims())

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
        out: torch.Tensor
        if kv is None:
            out = ops.attn_decode(
                q,
                k,
                v,
                mask=mask,
                causal_offset=causal_offset,
                window=window,
                softcap=softcap,
                sinks=sinks,
                scale=scale,
            )
            return out
        check_paged_options("fwd_decode", causal_offset)
        kv.write(layer_id, k, v)
        step = kv.step
        out = ops.attn_paged_decode(
            q,
            kv.k_pages[layer_id],
            kv.v_pages[layer_id],
            step.kv_indptr,
            step.kv_indices,
            step.kv_lens,
            mask=mask,
            window=window,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
            o_part=step.o_part,
            ml_part=step.ml_part,
            num_splits=step.num_splits,
            # The bound of all steps, not of this one: a captured graph is replayed for others.
            max_kv_len=kv.max_context,
        )
        return out

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
        out: torch.Tensor
        if kv is None:
            out = ops.attn_prefill(
                q,
                k,
                v,
                mask=mask,
                causal_offset=causal_offset,
                window=window,
                softcap=softcap,
                sinks=sinks,
                scale=scale,
            )
            return out
        check_paged_options("fwd_prefill", causal_offset)
        kv.write(layer_id, k, v)
        step = kv.step
        out = ops.attn_paged_prefill(
            q,
            kv.k_pages[layer_id],
            kv.v_pages[layer_id],
            step.qo_indptr,
            step.kv_indptr,
            step.kv_indices,
            step.kv_lens,
            mask=mask,
            window=window,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
            match_decode=kv.match_decode,
        )
        return out
