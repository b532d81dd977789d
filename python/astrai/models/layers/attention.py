"""Self-attention with a fused query, key and value projection."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from astrai.attention.rotary import apply_rotary_emb
from astrai.config import ModelConfig
from astrai.models.layers.linear import Linear
from astrai.models.layers.step import Step, StepBuffers


class BoundAttention(Protocol):
    """Attention over buffers.normed, written to buffers.delta."""

    def __call__(self, buffers: StepBuffers, step: Step) -> None: ...


class Attention(nn.Module):
    """Grouped-query attention: Hq query heads share Hkv key and value heads of width D.

    qkv_proj stacks the rows of the three projections: [(Hq + 2 * Hkv) * D, hidden].
    """

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_q_heads, self.num_kv_heads = config.num_q_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.rotary_dim, self.interleaved = config.rotary_dim, config.rope_interleaved
        heads = config.num_q_heads + 2 * config.num_kv_heads
        bias = config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, heads * config.head_dim, bias=bias)
        self.o_proj = Linear(config.num_q_heads * config.head_dim, config.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [B, L, hidden] or [T, hidden] -> the same shape; causality is step.attend's matter."""
        leading = x.shape[:-1]
        split = [self.num_q_heads, self.num_kv_heads, self.num_kv_heads]
        heads = self.qkv_proj(x).view(-1, sum(split), self.head_dim)
        q, k, v = torch.split(heads, split, dim=1)
        if self.rotary_dim:
            q, k = apply_rotary_emb(
                q, k, step.positions, step.cos_sin, interleaved=self.interleaved
            )
        attended = step.attend(q, k, v, self.layer_id)
        projected: torch.Tensor = self.o_proj(attended.reshape(*leading, -1))
        return projected

    def bind(self) -> BoundAttention:
        """The kernel calls of the layer over the present weights."""
        qkv_proj, o_proj = self.qkv_proj.bind(), self.o_proj.bind()
        layer_id, rotary_dim, interleaved = self.layer_id, self.rotary_dim, self.interleaved
        width = self.num_q_heads * self.head_dim

        def run(buffers: StepBuffers, step: Step) -> None:
            qkv_proj(buffers.normed, buffers.qkv)
            q, k = buffers.q, buffers.k
            if rotary_dim:
                q, k = apply_rotary_emb(q, k, step.positions, step.cos_sin, interleaved=interleaved)
            attended = step.attend(q, k, buffers.v, layer_id)
            o_proj(attended.reshape(-1, width), buffers.delta)

        return run
