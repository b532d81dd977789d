"""What must hold of an engine when its requests have ended, and ways to get in its way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from astrai import LLM, AsyncLLM

# Seconds after which something that should have happened never will.
HANG = 60.0


def check_empty(llm: LLM) -> None:
    """Nothing waits or runs, every page is free again, and the pool's books agree."""
    stats = llm.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert stats.free_pages == stats.num_pages, "pages were lost"
    llm._core.scheduler.pool.check_integrity()


def before_each_batch(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, hook: Callable[[Any], None]
) -> None:
    """Call `hook` with every batch before the executor runs it; what it raises fails the batch."""
    executor = llm._core._executor
    for name in ("execute_prefill", "execute_decode"):
        run = getattr(executor, name)

        def hooked(batch: Any, run: Callable[[Any], Any] = run) -> Any:
            hook(batch)
            return run(batch)

        monkeypatch.setattr(executor, name, hooked)


class Gate:
    """Holds an engine's thread inside a step until `open`; some batches may pass before."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, llm: AsyncLLM, free_batches: int = 0
    ) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        self._free_batches = free_batches
        before_each_batch(monkeypatch, llm._llm, self._pass)

    def _pass(self, batch: Any) -> None:
        if self._free_batches > 0:
            self._free_batches -= 1
            return
        self._reached.set()
        assert self._open.wait(HANG), "nobody opened the gate"

    async def reached(self) -> None:
        """Return when a step stands before the gate."""
        assert await asyncio.to_thread(self._reached.wait, HANG)

    def open(self) -> None:
        self._open.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exception: object) -> None:
        self.open()


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until the condition holds."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), HANG)


async def until_empty(llm: AsyncLLM) -> None:
    """Return when nothing waits or runs and every page is free, which it must be soon."""

    def is_empty() -> bool:
        stats = llm.stats()
        return stats.waiting == stats.running == 0 and stats.free_pages == stats.num_pages

    await until(is_empty)
    assert not llm._engine._open
    assert not llm._engine._tickets


async def until_queued(llm: AsyncLLM, count: int) -> None:
    """Return when `count` unfinished requests have been prepared and given to the engine."""

    def are_queued() -> bool:
        tickets = list(llm._engine._open.values())
        return len(tickets) == count and all(ticket.request is not None for ticket in tickets)

    await until(are_queued)
