"""Environment variables of the Python half, parsed in one place.

A variable that is unset or empty counts as absent. A value that does not parse raises ValueError
naming variable, value and rule. ASTRAI_NUM_THREADS and ASTRAI_CPU_ISA belong to the compiled
module, which checks them the same way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

ATTN_BACKEND = "ASTRAI_ATTN_BACKEND"
DEVICE = "ASTRAI_DEVICE"


def read_text(variable: str) -> str | None:
    """The value without surrounding blanks, or None."""
    return os.environ.get(variable, "").strip() or None


def read_choice(variable: str, choices: Sequence[str]) -> str | None:
    """One of `choices`, compared without regard to case, or None."""
    text = read_text(variable)
    if text is None:
        return None
    if text.lower() not in choices:
        raise ValueError(f"{variable}: {text!r}; expected one of {', '.join(choices)}")
    return text.lower()
