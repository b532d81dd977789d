"""Rotary embedding tables: angles of every position, shared by all layers of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from astrai.config import ModelConfig
from astrai.models.rope_scaling import check_rope_scaling, rope_type

_FIRST_TABLE_ROWS = 512


def build_inv_freq(config: ModelConfig) -> torch.Tensor:
    """Angular frequencies [rotary_dim / 2], float64, radians per position.

    The exponents run over the rotary width, not over the head width: a head whose rotation is
    partial turns at the same rates as a narrower head that rotates fully.
    Source: Su et al. 2021, arXiv:2104.09864; the llama3 rule is the one of Llama 3.1, which keeps
    short wavelengths, divides long ones by the factor and blends in between.
    """
    width = config.rotary_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / max(width, 1)
    inv_freq = torch.pow(config.rope_theta, -exponents)
    scaling = config.rope_scaling
    check_rope_scaling(scaling)
    kind = rope_type(scaling)
    if kind == "default" or scaling is None:
        return inv_freq
    if kind == "linear":
        return inv_freq / float(scaling["factor"])
    if kind == "factors":
        factors = torch.tensor(scaling["factors"], dtype=torch.float64, device="cpu")
        if factors.numel() != inv_freq.numel():
            raise ValueError(
                f"rope: {factors.numel()} frequency factors; expected {inv_freq.numel()} "
                f"(half of the rotary width {width})"
            )
        return inv_freq / factors
    return _llama3_inv_freq(inv_freq, scaling)


def _llama3_inv_freq(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    context = float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = context * inv_freq / (2 * math.pi)
    # 0 where a frequency turns at most `low` times within the original context, 1 from `high` on.
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * keep + inv_freq / float(scaling["factor"]) * (1 - keep)


def build_cos_sin(inv_freq: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Table [num_positions, R] float32: cosines in the first half of a row, sines in the second.

    Angles are formed in float64: position * frequency loses digits in float32 from a few thousand
    positions on.
    """
    positions = torch.arange(num_positions, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(torch.float32)


class RotaryTable:
    """The cos_sin table of a model, grown by doubling and kept on one device.

    It is derived from the configuration, so it is neither a parameter nor part of a state dict and
    keeps float32 whatever the dtype of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.width = config.rotary_dim
        self.interleaved = config.rope_interleaved
        self._inv_freq = build_inv_freq(config)
        self._limit = config.max_position
        self._table: torch.Tensor | None = None

    def cos_sin(self, num_positions: int, device: torch.device) -> torch.Tensor:
        """Table [>= num_positions, R] on `device`; the same tensor until it has to grow."""
        table = self._table
        if table is not None and table.shape[0] >= num_positions and table.device == device:
            return table
        rows = max(_FIRST_TABLE_ROWS, num_positions)
        if table is not None and table.shape[0] < num_positions:
            rows = max(rows, min(2 * table.shape[0], self._limit))
        # The table outlives this pass, which may be in inference mode, and a later one may train.
        with torch.inference_mode(False):
            self._table = build_cos_sin(self._inv_freq, rows).to(device)
        return self._table
