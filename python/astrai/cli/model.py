"""Opens the model that a command asked for, with a bar while it loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astrai.cli.console import progress_bar
from astrai.cli.options import ModelOptions

if TYPE_CHECKING:
    from astrai.engine import LLM


def open_model(options: ModelOptions, *, max_batch: int, quiet: bool = False) -> LLM:
    """Loads the model and returns the engine that runs it.

    max_batch: most requests to run at once; the engine sizes its cache for it.
    Raises what loading raises: FileNotFoundError or ValueError for a model that cannot be used.
    """
    with progress_bar("Loading", quiet=quiet) as progress:
        from astrai import LLM

        return LLM(
            options.model,
            device=options.device,
            dtype=options.dtype,
            attn_backend=options.attn_backend,
            max_context=options.max_context,
            max_batch=max_batch,
            progress=progress,
        )
