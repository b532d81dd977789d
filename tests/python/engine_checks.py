"""What must hold of an engine when its requests have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astrai import LLM


def check_empty(llm: LLM) -> None:
    """Nothing waits or runs, every page is free again, and the pool's books agree."""
    stats = llm.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert stats.free_pages == stats.num_pages, "pages were lost"
    llm._core.scheduler.pool.check_integrity()
