"""Ctrl-C during a step of the engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt after the body instead of anywhere inside it.

    A step moves pages and tokens together; an exception between two bytecodes would tear them
    apart. A second Ctrl-C does not wait. Elsewhere than in the main thread, and where the program
    handles SIGINT in its own way, nothing is changed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(signum, frame)
        pressed = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt
