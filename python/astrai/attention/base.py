"""What every attention backend offers, and what it says about itself."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from astrai.kv_cache import KVCache


class ATTN_BACKEND(enum.Enum):  # noqa: N801 - the public name is fixed
    """Names of the attention backends; the values are what users write."""

    TORCH_NATIVE = "torch_native"
    CPU = "cpu"
    CUDA = "cuda"
    FLASH = "flash"


class AttentionBackend(ABC):
    """Attention over dense tensors or over a paged cache.

    A backend has no state of its own, so one instance serves all models and threads.

    devices    device types that it takes ("cpu", "cuda"); None = any
    dtypes     dtypes of q, k and v; None = any floating dtype
    head_dims  head dims; None = any
    """

    kind: ClassVar[ATTN_BACKEND]
    devices: ClassVar[frozenset[str] | None] = None
    dtypes: ClassVar[frozenset[torch.dtype] | None] = None
    head_dims: ClassVar[frozenset[int] | None] = None

    @classmethod
    def unavailable_reason(cls, device: torch.device | str | None = None) -> str | None:
        """Why this backend cannot run on this machine at all, or None.

        device  the one in question, of a type that the backend serves; None: torch's current one
        """
        return None

    @classmethod
    def cannot_serve(
        cls, device: torch.device | str, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        """Why this backend cannot serve such tensors here, or None."""
        device_type = torch.device(device).type
        if cls.devices is not None and device_type not in cls.devices:
            return f"device {device_type}; it serves {_listed(cls.devices)}"
        if cls.dtypes is None:
            if not dtype.is_floating_point:
                return f"dtype {_dtype_name(dtype)}; it serves floating-point dtypes"
        elif dtype not in cls.dtypes:
            names = {_dtype_name(known) for known in cls.dtypes}
            return f"dtype {_dtype_name(dtype)}; it serves {_listed(names)}"
        if cls.head_dims is not None and head_dim not in cls.head_dims:
            known_dims = ", ".join(str(known) for known in sorted(cls.head_dims))
            return f"head_dim {head_dim}; it serves {known_dims}"
        return cls.unavailable_reason(device)

    @abstractmethod
    def fwd_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        kv: KVCache | None = None,
        layer_id: int = 0,
        mask: torch.Tensor | None = None,
        causal_offset: int = -1,
        window: int = -1,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attention of one query per request.

        Dense (kv None)  q [B, 1, Hq, D], k and v [B, Lk, Hkv, D] -> [B, 1, Hq, D]
        Paged (kv given) q [T, Hq, D], k and v [T, Hkv, D], the new rows of kv.step. They are
                         written to the cache of layer_id, then every row attends to its own
                         request's pages up to itself -> [T, Hq, D]. causal_offset must stay -1:
                         positions come from kv.step.

        mask, causal_offset, window, softcap, sinks and scale mean what they mean in
        astrai.extension.ops.attn_decode. Raises ValueError when a shape, dtype, device or option
        cannot be served.
        """

    @abstractmethod
    def fwd_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        kv: KVCache | None = None,
        layer_id: int = 0,
        mask: torch.Tensor | None = None,
        causal_offset: int = -1,
        window: int = -1,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """The same with any number of queries per request: dense q [B, Lq, Hq, D], paged rows as
        kv.step.qo_indptr cuts them."""


def check_paged_options(op: str, causal_offset: int) -> None:
    """Raise ValueError unless causal_offset was left alone, as a paged call requires."""
    if causal_offset != -1:
        raise ValueError(
            f"{op}: causal_offset {causal_offset} with a KV cache; "
            "expected -1 (positions come from the cache's step)"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names))
