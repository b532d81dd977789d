"""Which model class serves which architecture name.

Files name an architecture in their own way: a Hugging Face config by class name and model type, a
GGUF file by `general.architecture`. Classes are imported when they are first asked for, so listing
the names needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astrai.models.base import CausalLM


@dataclass(frozen=True)
class Architecture:
    """One architecture: its name here, its class ("module:Class") and the names files use."""

    name: str
    class_path: str
    hf_architectures: tuple[str, ...]
    hf_model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]


_ARCHITECTURES: dict[str, Architecture] = {}


def register(architecture: Architecture) -> None:
    """Add an architecture. Raises ValueError if the name is taken."""
    if architecture.name in _ARCHITECTURES:
        raise ValueError(
            f"register: architecture {architecture.name!r} is already registered; "
            "expected a new name"
        )
    _ARCHITECTURES[architecture.name] = architecture


def supported() -> list[str]:
    """Names of the registered architectures, sorted."""
    return sorted(_ARCHITECTURES)


def get_model_class(architecture: str) -> type[CausalLM]:
    """The class for a name of `supported()`. Raises ValueError naming the known ones."""
    entry = _ARCHITECTURES.get(architecture)
    if entry is None:
        raise ValueError(
            f"get_model_class: architecture {architecture!r}; "
            f"expected one of {', '.join(supported())}"
        )
    module, _, name = entry.class_path.partition(":")
    model_class: type[CausalLM] = getattr(import_module(module), name)
    return model_class


def resolve_hf(architectures: Sequence[str], model_type: str | None) -> str:
    """Name for a config.json's `architectures`, or without them for its `model_type`.

    Raises ValueError naming what was found and the Hugging Face names that are supported.
    """
    for entry in _ARCHITECTURES.values():
        if any(name in entry.hf_architectures for name in architectures):
            return entry.name
    if not architectures:
        for entry in _ARCHITECTURES.values():
            if model_type in entry.hf_model_types:
                return entry.name
    known = sorted(name for entry in _ARCHITECTURES.values() for name in entry.hf_architectures)
    found = ", ".join(architectures) or f"model_type {model_type}"
    raise ValueError(f"unknown architecture {found}; expected one of {', '.join(known)}")


def resolve_gguf(architecture: str) -> str:
    """Name for a GGUF file's `general.architecture`. Raises ValueError as resolve_hf does."""
    for entry in _ARCHITECTURES.values():
        if architecture in entry.gguf_architectures:
            return entry.name
    known = sorted(name for entry in _ARCHITECTURES.values() for name in entry.gguf_architectures)
    raise ValueError(f"unknown architecture {architecture!r}; expected one of {', '.join(known)}")


register(
    Architecture(
        name="llama",
        class_path="astrai.models.llama:LlamaForCausalLM",
        hf_architectures=("LlamaForCausalLM",),
        hf_model_types=("llama",),
        gguf_architectures=("llama",),
    )
)
