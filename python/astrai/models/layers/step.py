"""What one forward pass hands to every layer: decided and allocated once, then only read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from astrai.config import ModelConfig


class Attend(Protocol):
    """Causal attention of one layer: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Step:
    """One forward pass over T rows.

    attend      attention of the chosen backend, dense or over the KV cache
    positions   [T] int, position of every row
    cos_sin     [>= max position + 1, R] float32 rotary table
    """

    attend: Attend
    positions: torch.Tensor
    cos_sin: torch.Tensor


class StepBuffers:
    """Scratch rows of a kernel pass over T tokens; every layer overwrites the same memory.

    residual [T, hidden] carries the sum of all layers so far, delta [T, hidden] what the last
    sub-layer adds to it. q, k, v are views of qkv, so splitting costs nothing per layer.
    """

    __slots__ = ("delta", "gate_up", "inner", "k", "normed", "q", "qkv", "residual", "v")

    def __init__(self, config: ModelConfig, embedded: torch.Tensor) -> None:
        rows = embedded.shape[0]
        num_q, num_kv, width = config.num_q_heads, config.num_kv_heads, config.head_dim
        self.residual = embedded
        self.delta = torch.empty_like(embedded)
        self.normed = torch.empty_like(embedded)
        self.qkv = embedded.new_empty(rows, (num_q + 2 * num_kv) * width)
        heads = self.qkv.view(rows, num_q + 2 * num_kv, width)
        self.q, self.k, self.v = torch.split(heads, [num_q, num_kv, num_kv], dim=1)
        self.gate_up = embedded.new_empty(rows, 2 * config.intermediate_size)
        self.inner = embedded.new_empty(rows, config.intermediate_size)
