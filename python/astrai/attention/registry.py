"""Which backend runs: an explicit choice, or the first one that can serve."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from astrai import env
from astrai.attention.base import ATTN_BACKEND, AttentionBackend
from astrai.attention.cpu import CpuBackend
from astrai.attention.cuda import CudaBackend
from astrai.attention.flash import FlashAttnBackend
from astrai.attention.torch_native import TorchNativeBackend

_logger = logging.getLogger("astrai.attention")

_BACKEND_REGISTRY: dict[ATTN_BACKEND, type[AttentionBackend]] = {
    ATTN_BACKEND.TORCH_NATIVE: TorchNativeBackend,
    ATTN_BACKEND.CPU: CpuBackend,
    ATTN_BACKEND.CUDA: CudaBackend,
    ATTN_BACKEND.FLASH: FlashAttnBackend,
}

# Best first. TORCH_NATIVE serves every device and ends both lists.
_AUTOMATIC_ORDER = {
    "cpu": (ATTN_BACKEND.CPU, ATTN_BACKEND.TORCH_NATIVE),
    "cuda": (ATTN_BACKEND.CUDA, ATTN_BACKEND.FLASH, ATTN_BACKEND.TORCH_NATIVE),
}

_chosen: ContextVar[ATTN_BACKEND | None] = ContextVar("astrai_attn_backend", default=None)
_instances: dict[ATTN_BACKEND, AttentionBackend] = {}
_logged: set[str] = set()


def _parse(name: str | ATTN_BACKEND) -> ATTN_BACKEND:
    if isinstance(name, ATTN_BACKEND):
        return name
    if not isinstance(name, str):
        raise TypeError(f"attn_backend: {name!r}; expected a name or an ATTN_BACKEND")
    try:
        return ATTN_BACKEND(name.strip().lower())
    except ValueError:
        known = ", ".join(kind.value for kind in ATTN_BACKEND)
        raise ValueError(f"attn_backend: {name!r}; expected one of {known}") from None


@contextmanager
def attn_backend(name: str | ATTN_BACKEND) -> Iterator[ATTN_BACKEND]:
    """Make a backend the explicit choice inside the `with` block.

    The choice is strict: select_backend raises where it cannot serve. Blocks nest, the innermost
    one counts, and it outranks ASTRAI_ATTN_BACKEND. It belongs to the current context, so other
    threads and tasks that are already running do not see it.

    name    "torch_native", "cpu", "cuda", "flash", or an ATTN_BACKEND
    Yields  the ATTN_BACKEND
    Raises  ValueError: an unknown name, with the known ones listed
    """
    kind = _parse(name)
    token = _chosen.set(kind)
    try:
        yield kind
    finally:
        _chosen.reset(token)


def explicit_choice() -> ATTN_BACKEND | None:
    """The backend that attn_backend(...) or ASTRAI_ATTN_BACKEND asks for, or None.

    Raises ValueError when the variable names no backend.
    """
    kind = _chosen.get()
    if kind is not None:
        return kind
    name = env.read_choice(env.ATTN_BACKEND, [known.value for known in ATTN_BACKEND])
    return None if name is None else ATTN_BACKEND(name)


def select_backend(
    device: torch.device | str, dtype: torch.dtype, head_dim: int
) -> AttentionBackend:
    """The backend for attention over such tensors.

    An explicit choice is strict. Otherwise the first one that can serve is taken: on the CPU the
    CPU kernels, on CUDA the CUDA kernels, then flash-attn, elsewhere and last plain torch. Each
    distinct reason for passing one over is logged once, as a warning of logger "astrai.attention".

    device, dtype, head_dim  of q, k and v
    Raises  ValueError: the explicit choice does not take this device, dtype or head_dim.
            RuntimeError: it is not available on this machine. Both name the reason.
    """
    kind = explicit_choice()
    if kind is not None:
        return _strict(kind, device, dtype, head_dim)
    order = _AUTOMATIC_ORDER.get(torch.device(device).type, (ATTN_BACKEND.TORCH_NATIVE,))
    for candidate in order:
        reason = _BACKEND_REGISTRY[candidate].cannot_serve(device, dtype, head_dim)
        if reason is None:
            return _instance(candidate)
        _log_once(f"attention backend {candidate.value} is passed over: {reason}")
    raise ValueError(
        f"select_backend: no backend serves device {device}, dtype {dtype}, head_dim {head_dim}; "
        "expected floating-point tensors"
    )


def _strict(
    kind: ATTN_BACKEND, device: torch.device | str, dtype: torch.dtype, head_dim: int
) -> AttentionBackend:
    backend = _BACKEND_REGISTRY[kind]
    reason = backend.cannot_serve(device, dtype, head_dim)
    if reason is None:
        return _instance(kind)
    text = f"attention backend {kind.value}, chosen explicitly, cannot serve: {reason}"
    if reason == backend.unavailable_reason(device):
        raise RuntimeError(text)
    raise ValueError(text)


def _instance(kind: ATTN_BACKEND) -> AttentionBackend:
    backend = _instances.get(kind)
    if backend is None:
        backend = _instances.setdefault(kind, _BACKEND_REGISTRY[kind]())
    return backend


def _log_once(reason: str) -> None:
    if reason not in _logged:
        _logged.add(reason)
        _logger.warning(reason)
