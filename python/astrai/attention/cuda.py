"""Attention by the compiled CUDA kernels."""

from __future__ import annotations

from functools import cache

import torch

from astrai.attention.base import ATTN_BACKEND
from astrai.attention.kernels import KernelBackend
from astrai.extension.devices import cuda_kernels_reason


class CudaBackend(KernelBackend):
    """The kernels of this project on CUDA devices.

    Where they cannot run, automatic selection falls back to torch; an explicit choice raises. Both
    name the reason: a build without CUDA, no device, or no code for the device's architecture.
    """

    kind = ATTN_BACKEND.CUDA
    devices = frozenset({"cuda"})
    dtypes = frozenset({torch.float32, torch.float16, torch.bfloat16})

    @classmethod
    def unavailable_reason(cls, device: torch.device | str | None = None) -> str | None:
        index = None if device is None else torch.device(device).index
        return _unavailable_reason(_current_index() if index is None else index)


def _current_index() -> int:
    """torch's current device, which is the first one until torch has started CUDA."""
    is_started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if is_started else 0


@cache
def _unavailable_reason(index: int) -> str | None:
    reason = cuda_kernels_reason(index)
    if reason is not None:
        return reason
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None
