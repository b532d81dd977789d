"""One request as the coroutine that waits for it sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from astrai.engine.outputs import StreamEvent
from astrai.engine.request import Request


class Ticket:
    """Carries what the engine's thread has to say about a request into an event loop.

    op               the method that was called; begins messages
    request_id       the caller's name for the request, or a number
    loop             the event loop that waits; `receive` and the coroutines run in it only
    request          None while the prompt is being prepared
    is_abort_wanted  abort was asked for before there was a request
    is_done          nothing more will be received
    """

    def __init__(self, op: str, request_id: int | str, loop: asyncio.AbstractEventLoop) -> None:
        self.op = op
        self.request_id = request_id
        self.loop = loop
        self.request: Request | None = None
        self.is_abort_wanted = False
        self.is_done = False
        self._error: Exception | None = None
        self._events: deque[StreamEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def receive(
        self, events: Iterable[StreamEvent], is_done: bool, error: Exception | None = None
    ) -> None:
        """Take what a step has brought; `error` is raised once the events have been read."""
        self._events.extend(events)
        self.is_done, self._error = is_done, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_event(self) -> StreamEvent | None:
        """The next event; None after the last one."""
        while not self._events and not self.is_done:
            await self._wait()
        if self._events:
            return self._events.popleft()
        self._raise_error()
        return None

    async def wait_done(self) -> None:
        """Return when the request has ended."""
        while not self.is_done:
            await self._wait()
        self._raise_error()

    async def _wait(self) -> None:
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
