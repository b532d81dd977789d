"""The gated MLP of Llama-like models."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from astrai.config import ModelConfig
from astrai.models.layers.linear import Linear
from astrai.models.layers.step import StepBuffers


class BoundMLP(Protocol):
    """The MLP of buffers.normed, written to buffers.delta."""

    def __call__(self, buffers: StepBuffers) -> None: ...


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up stored as one matrix [2 * intermediate, hidden].

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        projected: torch.Tensor = self.down_proj(F.silu(gate) * up)
        return projected

    def bind(self) -> BoundMLP:
        """The three kernel calls of the MLP over the present weights."""
        from astrai.extension import ops

        silu_mul = ops.silu_mul
        gate_up_proj, down_proj = self.gate_up_proj.bind(), self.down_proj.bind()

        def run(buffers: StepBuffers) -> None:
            gate_up_proj(buffers.normed, buffers.gate_up)
            silu_mul(buffers.gate_up, out=buffers.inner)
            down_proj(buffers.inner, buffers.delta)

        return run
