"""Ctrl-C during a step of the engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the body calls what this yields, or ends.

    A step moves pages and tokens together; an exception between two bytecodes would tear them
    apart. The yielded function raises KeyboardInterrupt if Ctrl-C has come meanwhile. A second
    Ctrl-C does not wait. Elsewhere than in the main thread, and where the program handles SIGINT in
    its own way, nothing is changed.
    """
    pressed = False

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(signum, frame)
        pressed = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
