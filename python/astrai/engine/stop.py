"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Watches text for stop strings and keeps back what may be the beginning of one.

    The text ends where a stop string is first complete; of two that are complete at the same
    character the longer one counts. The result does not depend on how the text is cut into pieces.

    Each stop string has a Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt 1977,
    doi:10.1137/0206024): its state is the length of the longest beginning of the stop string that
    the text ends with, so the longest state is exactly what has to be kept back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`stops` are non-empty; `include_stop` leaves the stop string in the text."""
        if not all(stops):
            raise ValueError("StopMatcher: stops has an empty string; expected text")
        self._stops = tuple(stops)
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain now; nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        start = len(self._held)
        pending = self._held + text
        for end in range(start, len(pending)):
            stop = self._advance(pending[end])
            if stop is not None:
                self.matched = stop
                self._held = ""
                return pending[: end + 1] if self._include_stop else pending[: end + 1 - len(stop)]
        certain = len(pending) - max(self._states)
        self._held = pending[certain:]
        return pending[:certain]

    def pass_through(self, text: str) -> str:
        """Text that is not looked at: no stop string matches it or reaches into it."""
        released = self.flush()
        return released + text

    def flush(self) -> str:
        """Releases the text kept back: at the end it is no stop string after all."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Moves every automaton on; the longest stop string that this character completes."""
        complete: str | None = None
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != character:
                state = self._failure[i][state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                state = self._failure[i][state - 1]
            self._states[i] = state
        return complete


@lru_cache(maxsize=1024)  # the samples of a request have the same stop strings
def _failure_table(pattern: str) -> tuple[int, ...]:
    """Entry i: length of the longest proper beginning of pattern[: i + 1] that also ends it."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return tuple(table)
