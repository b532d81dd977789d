"""Attention by the compiled CUDA kernels."""

from __future__ import annotations

import torch

from astrai.attention.base import ATTN_BACKEND
from astrai.attention.kernels import KernelBackend


class CudaBackend(KernelBackend):
    """The kernels of this project on CUDA devices.

    Where they are missing, automatic selection falls back to torch; an explicit choice raises.
    """

    kind = ATTN_BACKEND.CUDA
    devices = frozenset({"cuda"})
    dtypes = frozenset({torch.float32, torch.float16, torch.bfloat16})

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return "astrai has no CUDA kernel for prefill attention yet"
