"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class BoundNorm(Protocol):
    """A norm as one kernel call: writes `out`; with `residual`, adds x to it in place first."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor: ...


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, with the mean taken in float32.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight

    def bind(self) -> BoundNorm:
        """The norm, with its residual add fused, as one kernel call over the present weight."""
        from astrai.extension import ops

        kernel, weight, eps = ops.rms_norm, self.weight.detach(), self.eps

        def run(x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
            kernel(x, weight, eps=eps, residual=residual, out=out)
            return out

        return run
