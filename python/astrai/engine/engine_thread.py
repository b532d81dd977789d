"""The thread that runs an engine for coroutines."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from weakref import WeakSet, WeakValueDictionary

from astrai.engine.core import EngineCore
from astrai.engine.errors import EngineBusyError, EngineClosedError
from astrai.engine.request import Request
from astrai.engine.ticket import Ticket

_logger = logging.getLogger("astrai.engine")


class EngineThread:
    """Steps an EngineCore while there is work, and sleeps otherwise.

    Nobody else touches the core: callers leave messages, which are read between two steps, and the
    thread answers through `call_soon_threadsafe`, once a step for each event loop. So no caller
    ever waits for a step, and requests may come from any number of event loops and threads.

    stats  counters of the engine after its last step or message
    """

    def __init__(self, core: EngineCore, max_batch: int, max_waiting: int) -> None:
        """Start the thread. It takes max_batch + max_waiting unfinished requests."""
        self._core = core
        self._max_batch, self._max_waiting = max_batch, max_waiting
        self.stats = core.stats()
        self._process_id = os.getpid()
        # A SimpleQueue may be put to at any moment, in a finaliser too.
        self._mailbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Held for moments only. Reentrant, for finalisers that run while it is held.
        self._lock = threading.RLock()
        self._is_closed = False
        self._failure: BaseException | None = None
        self._numbers = count()
        # The unfinished requests. A ticket whose coroutine has vanished with its loop leaves too.
        self._open: WeakValueDictionary[int | str, Ticket] = WeakValueDictionary()
        # What follows belongs to the thread.
        self._is_stopping = False
        self._tickets: dict[int, Ticket] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        # A daemon, because the interpreter waits for other threads before it calls _stop_all.
        self._thread = threading.Thread(target=self._run, name="astrai-engine", daemon=True)
        self._thread.start()
        _running.add(self)

    # --- for callers --------------------------------------------------------------------------

    def check_open(self, op: str) -> None:
        """Raise unless requests are taken."""
        self._check_process(op)
        if self._is_closed:
            raise self._closed_error(op) from self._failure

    def _check_process(self, op: str) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"{op}: the engine belongs to process {self._process_id}, this is its fork "
                f"{os.getpid()}; expected an engine made in this process"
            )

    def admit(self, op: str, request_id: str | None) -> Ticket:
        """A place for a request of the running event loop.

        Raises EngineBusyError, EngineClosedError; ValueError if the id is in use.
        """
        self.check_open(op)
        loop = asyncio.get_running_loop()
        with self._lock:
            self.check_open(op)
            name = next(self._numbers) if request_id is None else request_id
            if name in self._open:
                raise ValueError(
                    f"{op}: request_id {name!r} belongs to an unfinished request; expected a new id"
                )
            unfinished = len(self._open)
            if unfinished >= self._max_batch + self._max_waiting:
                raise EngineBusyError(op, unfinished, self._max_batch, self._max_waiting)
            ticket = self._open[name] = Ticket(op, name, loop)
            return ticket

    def submit(self, ticket: Ticket, request: Request) -> None:
        """Queue the request of an admitted ticket."""
        with self._lock:
            self.check_open(ticket.op)
            ticket.request = request
            self._mailbox.put(partial(self._take, ticket))

    def release(self, ticket: Ticket) -> None:
        """Give an admitted ticket's place back; a request that has not ended is aborted."""
        with self._lock:
            self._forget(ticket)
            if ticket.request is not None and not ticket.is_done and not self._is_closed:
                self._mailbox.put(partial(self._drop, ticket))

    async def abort(self, request_id: str | int) -> bool:
        """End a request; False if it is unknown or has ended. Its pages are free on return."""
        self._check_process("abort")
        loop = asyncio.get_running_loop()
        with self._lock:
            ticket = self._open.get(request_id)
            if ticket is None or self._is_closed:
                return False
            if ticket.request is None:
                is_first, ticket.is_abort_wanted = not ticket.is_abort_wanted, True
                return is_first
            reply: asyncio.Future[bool] = loop.create_future()
            self._mailbox.put(partial(self._abort, ticket, loop, reply))
        return await reply

    def stop(self) -> None:
        """Refuse new requests and make the thread end what it has. Does not wait for it."""
        if os.getpid() != self._process_id:
            return  # a fork has no such thread, and the lock may be held for ever
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._mailbox.put(self._begin_stopping)

    def join(self) -> None:
        """Wait for the thread to end, after `stop`."""
        if os.getpid() == self._process_id:
            self._thread.join()

    def _closed_error(self, op: str) -> EngineClosedError:
        if self._failure is None:
            return EngineClosedError(f"{op}: this AsyncLLM was closed; expected an open one")
        failure = self._failure
        return EngineClosedError(
            f"{op}: the engine stopped after {type(failure).__name__}: {failure}; "
            "expected a running one"
        )

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            if self._open.get(ticket.request_id) is ticket:
                del self._open[ticket.request_id]

    # --- messages -----------------------------------------------------------------------------

    def _take(self, ticket: Ticket) -> None:
        request = _request_of(ticket)
        self._tickets[request.request_id] = ticket
        if self._is_closed:
            return  # _end tells everybody
        try:
            self._core.submit(request)
        except Exception as error:
            request.error = error
            self._core.abort(request.request_id)
        if ticket.is_abort_wanted:
            self._core.abort(request.request_id)
        self._deliver(ticket)

    def _drop(self, ticket: Ticket) -> None:
        request_id = _request_of(ticket).request_id
        # At the end everything is aborted at once.
        if self._tickets.pop(request_id, None) is not None and not self._is_closed:
            self._core.abort(request_id)

    def _abort(
        self, ticket: Ticket, loop: asyncio.AbstractEventLoop, reply: asyncio.Future[bool]
    ) -> None:
        was_running = not self._is_closed and self._core.abort(_request_of(ticket).request_id)
        if was_running:
            self._deliver(ticket)
        self._post(loop, partial(_answer, reply, was_running))

    def _begin_stopping(self) -> None:
        self._is_stopping = True

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._is_stopping:
                self._read_mail()
                if self._core.has_work and not self._is_stopping:
                    self._step()
        except BaseException as error:
            _logger.critical("the engine stopped", exc_info=error)
            failure = error
        self._end(failure)

    def _step(self) -> None:
        for request in self._core.advance():
            ticket = self._tickets.get(request.request_id)
            if ticket is not None:
                self._deliver(ticket)
        self._publish()

    def _read_mail(self) -> None:
        if not self._core.has_work:
            self._mailbox.get()()
        elif self._mailbox.empty():
            return
        for _ in range(self._mailbox.qsize()):
            self._mailbox.get()()
        self._publish()

    def _deliver(self, ticket: Ticket) -> None:
        """Post what is new about a request, if anything is."""
        request = _request_of(ticket)
        events = list(request.events or ())
        if request.events is not None:
            request.events.clear()
        is_done = request.is_finished
        if is_done:
            self._tickets.pop(request.request_id, None)
            self._forget(ticket)
        if events or is_done:
            self._post(ticket.loop, partial(ticket.receive, events, is_done))

    def _post(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._outbox.setdefault(loop, []).append(call)

    def _publish(self) -> None:
        """Send what was posted, each loop's in one go."""
        self.stats = self._core.stats()
        outbox, self._outbox = self._outbox, {}
        for loop, calls in outbox.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:
                if not loop.is_closed():
                    raise
                self._abandon(loop)

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Abort the requests of a closed loop: nobody waits for them any more."""
        for ticket in [ticket for ticket in self._tickets.values() if ticket.loop is loop]:
            self._drop(ticket)
            self._forget(ticket)
        self.stats = self._core.stats()

    def _end(self, failure: BaseException | None) -> None:
        """Tell everybody who still waits that nothing more will come."""
        with self._lock:
            self._is_closed, self._failure = True, failure
        # Nobody leaves messages from now on.
        while True:
            try:
                self._mailbox.get_nowait()()
            except Empty:
                break
        try:
            self._core.abort_all()
        except Exception as error:
            _logger.critical("the engine's pages could not be returned", exc_info=error)
        for ticket in self._tickets.values():
            closed = self._closed_error(ticket.op)
            closed.__cause__ = failure
            self._post(ticket.loop, partial(ticket.receive, (), True, closed))
            self._forget(ticket)
        self._tickets.clear()
        self._publish()


_running: WeakSet[EngineThread] = WeakSet()


def _stop_all() -> None:
    """At the interpreter's end: a thread inside a kernel must not outlive the interpreter."""
    threads = list(_running)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join()


atexit.register(_stop_all)


def _request_of(ticket: Ticket) -> Request:
    assert ticket.request is not None  # submit has set it
    return ticket.request


def _answer(reply: asyncio.Future[bool], value: bool) -> None:
    if not reply.done():
        reply.set_result(value)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
