"""Attention by the compiled CPU kernels."""

from __future__ import annotations

import torch

from astrai.attention.base import ATTN_BACKEND
from astrai.attention.kernels import KernelBackend


class CpuBackend(KernelBackend):
    """The kernels of this project on the CPU, in the instruction set picked at load."""

    kind = ATTN_BACKEND.CPU
    devices = frozenset({"cpu"})
    dtypes = frozenset({torch.float32, torch.float16, torch.bfloat16})
