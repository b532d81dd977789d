"""Names and parameters of the rotary scaling rules, checked without torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

# Scaling rules that models/layers/rope.py implements. "factors" is GGUF's spelling: one divisor per
# frequency, stored as a tensor in the file.
ROPE_TYPES = ("default", "linear", "llama3", "factors")


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """Name of the scaling rule; both spellings of the key are in use ("rope_type", "type")."""
    if not scaling:
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def check_rope_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Raise ValueError naming the rule if it is not implemented or lacks a parameter."""
    kind = rope_type(scaling)
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope: scaling type {kind!r}; expected one of {', '.join(ROPE_TYPES)}")
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        "factors": ("factors",),
    }[kind]
    for name in needed:
        value = (scaling or {}).get(name)
        values = value if name == "factors" and isinstance(value, (list, tuple)) else (value,)
        for number in values:
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise ValueError(f"rope: {kind} scaling has {name} {number!r}; expected a number")
            if not 0 < number <= sys.float_info.max:
                raise ValueError(f"rope: {kind} scaling has {name} {number}; expected above 0")
    if kind == "llama3" and scaling is not None:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if low >= high:
            raise ValueError(
                f"rope: llama3 scaling has low_freq_factor {low} and high_freq_factor {high}; "
                "expected low below high"
            )
