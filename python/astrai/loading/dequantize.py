"""Stored GGUF bytes into a tensor of the wanted dtype, a block of rows at a time.

The three commonest quantisations are unpacked by torch: bit for bit what `gguf.dequantize` gives,
several times faster, since the values go straight to their place. All others go through it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

# Values unpacked at once: few enough to stay in the cache, enough to make calls few.
_CHUNK_VALUES = 1 << 20


def dequantize_into(
    data: np.ndarray[Any, np.dtype[np.uint8]], ggml_type: GGMLQuantizationType, out: torch.Tensor
) -> None:
    """Unpack `data` [rows, bytes per row] uint8 into `out` [.., columns], any float dtype.

    Raises ValueError if the sizes do not fit.
    """
    rows = data.shape[0]
    if rows == 0 or out.numel() % rows != 0:
        raise ValueError(f"dequantize_into: {rows} rows for {out.numel()} values; expected a fit")
    columns = out.numel() // rows
    target = out.view(rows, columns)
    unpack = _UNPACK.get(ggml_type)
    step = max(1, _CHUNK_VALUES // columns)
    with warnings.catch_warnings():
        # The map is read-only and nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for start in range(0, rows, step):
            part, place = data[start : start + step], target[start : start + step]
            if unpack is not None:
                unpack(torch.from_numpy(part), place)
            else:
                values = dequantize(part, ggml_type)
                place.copy_(torch.from_numpy(values).view(place.shape))


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def unpack(data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(data.view(dtype))

    return unpack


def _unpack_q8_0(data: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks of 32 values: scale f16, 32 int8."""
    blocks = data.view(-1, 34)
    scale = blocks[:, :2].view(torch.float16).float()
    out.view(-1, 32).copy_(blocks[:, 2:].view(torch.int8) * scale)


def _unpack_q4_0(data: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks of 32 values: scale f16, 16 bytes holding value i low and value i + 16 high."""
    blocks = data.view(-1, 18)
    scale = blocks[:, :2].view(torch.float16).float()
    packed = blocks[:, 2:]
    halves = out.view(-1, 2, 16)
    halves[:, 0] = ((packed & 15).to(torch.int8) - 8) * scale
    halves[:, 1] = ((packed >> 4).to(torch.int8) - 8) * scale


def _unpack_q4_1(data: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks of 32 values: scale f16, minimum f16, 16 bytes packed as in Q4_0."""
    blocks = data.view(-1, 20)
    scale = blocks[:, :2].view(torch.float16).float()
    minimum = blocks[:, 2:4].view(torch.float16).float()
    packed = blocks[:, 4:]
    halves = out.view(-1, 2, 16)
    halves[:, 0] = (packed & 15) * scale + minimum
    halves[:, 1] = (packed >> 4) * scale + minimum


_UNPACK: dict[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor], None]] = {
    GGMLQuantizationType.F32: _plain(torch.float32),
    GGMLQuantizationType.F16: _plain(torch.float16),
    GGMLQuantizationType.BF16: _plain(torch.bfloat16),
    GGMLQuantizationType.Q8_0: _unpack_q8_0,
    GGMLQuantizationType.Q4_0: _unpack_q4_0,
    GGMLQuantizationType.Q4_1: _unpack_q4_1,
}
