"""Which devices the compiled kernels run on."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from astrai.extension.loader import load

if TYPE_CHECKING:
    import torch

    from astrai.extension.lib import _ext
else:
    _ext = load()


@cache
def cuda_kernels_reason(index: int) -> str | None:
    """Why no CUDA kernel of this build can run on CUDA device `index`, or None if they can."""
    return _ext.cuda_unavailable_reason(index) or None


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels of this build run on the tensors of a device."""
    if device.type == "cuda":
        return cuda_kernels_reason(device.index or 0) is None
    return device.type == "cpu"
