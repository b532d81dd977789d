"""Attention backends, their selection, and the rotary embedding."""

from astrai.attention.base import ATTN_BACKEND, AttentionBackend
from astrai.attention.cpu import CpuBackend
from astrai.attention.cuda import CudaBackend
from astrai.attention.flash import FlashAttnBackend, flash_attn_available
from astrai.attention.registry import (
    _BACKEND_REGISTRY,
    attn_backend,
    explicit_choice,
    select_backend,
)
from astrai.attention.rotary import apply_rotary_emb
from astrai.attention.torch_native import TorchNativeBackend

__all__ = [
    "ATTN_BACKEND",
    "_BACKEND_REGISTRY",
    "AttentionBackend",
    "CpuBackend",
    "CudaBackend",
    "FlashAttnBackend",
    "TorchNativeBackend",
    "apply_rotary_emb",
    "attn_backend",
    "explicit_choice",
    "flash_attn_available",
    "select_backend",
]
