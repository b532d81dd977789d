"""Measures how fast answers come and says it in a line."""

from __future__ import annotations

import time


class StreamTimer:
    """Times one streamed answer: the wait for its first token and the rate of the rest."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last = self._started
        self.num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Counts tokens that have just arrived."""
        self._last = time.perf_counter()
        if num_tokens and self._first is None:
            self._first = self._last
        self.num_tokens += num_tokens

    def line(self) -> str:
        """Such as `64 tokens, first after 0.11 s, then 75.2 tokens/s`."""
        if self._first is None:
            return "0 tokens"
        text = f"{_tokens(self.num_tokens)}, first after {self._first - self._started:.2f} s"
        decode_seconds = self._last - self._first
        if self.num_tokens > 1 and decode_seconds > 0:
            text += f", then {(self.num_tokens - 1) / decode_seconds:.1f} tokens/s"
        return text


def rate_line(num_tokens: int, seconds: float, num_prompts: int) -> str:
    """Such as `8 prompts, 512 tokens in 3.20 s, 160.0 tokens/s`."""
    prompts = f"{num_prompts} prompt" + ("" if num_prompts == 1 else "s")
    rate = f", {num_tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
    return f"{prompts}, {_tokens(num_tokens)} in {seconds:.2f} s{rate}"


def _tokens(count: int) -> str:
    return f"{count} token" + ("" if count == 1 else "s")
