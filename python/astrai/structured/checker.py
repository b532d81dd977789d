"""Tries a grammar in a child process, where a hang or a crash harms nobody.

llguidance bounds the work of its lexer and parser, but some inputs get past these bounds: a schema
that intersects thirty patterns never returns, and a few thousand nested rules overflow the stack of
the process. Neither can be caught from inside.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("check_process.py")
# Python, llguidance and the vocabulary are loaded once, before the first grammar.
_START_SECONDS = 60.0


class GrammarChecker:
    """The child process, started with the first grammar and kept for the next.

    setup    what check_process reads first
    seconds  how long it may take over one grammar
    """

    def __init__(self, setup: dict[str, Any], seconds: float) -> None:
        self._setup = {**setup, "seconds": seconds}
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GrammarChecker] | None = None

    def check(self, grammar: str, options: str, is_gbnf: bool) -> str:
        """The grammar in Lark, if it can be served; else ValueError saying what is wrong."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._ask({"grammar": grammar, "options": options, "is_gbnf": is_gbnf})
        if answer["error"] is not None:
            raise ValueError(answer["error"])
        return str(answer["grammar"])

    def kill(self) -> None:
        """End the child process, also while another thread waits for its answer."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self) -> None:
        self.close()
        # The child finds llguidance where this process found it.
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C in a terminal is for the engine
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        try:
            self._send(self._setup)
            ready = self._read_line(_START_SECONDS)
        except BaseException:
            self.close()
            raise
        if ready is None or not ready.endswith(b"\n"):
            self.close()
            raise RuntimeError(
                f"structured output: {sys.executable} did not start to check grammars within "
                f"{_START_SECONDS:g} seconds; expected a Python that can import llguidance"
            )

    def _send(self, value: Any) -> None:
        process = self._process
        assert process is not None and process.stdin is not None  # noqa: PT018  (both set by _start)
        try:
            pickle.dump(value, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            return  # its end is noticed when the answer is read

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None  # started by check
        try:
            self._send(job)
            line = self._read_line(self._seconds)
        except BaseException:
            self.close()  # an answer that comes later must not be taken for the next one's
            raise
        if line is None:
            self.close()
            raise ValueError(f"compiling it takes longer than {self._seconds:g} seconds")
        if not line.endswith(b"\n"):
            code = process.wait()
            self.close()
            # Rust ends a process that finds no memory with SIGABRT, Python with an exit code.
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ValueError(
                f"compiling it ended with {how}: it is too deeply nested or needs too much memory "
                "or time"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read_line(self, seconds: float) -> bytes | None:
        """What the child writes up to the end of a line or of its output; None if it takes longer
        than `seconds`."""
        process = self._process
        assert process is not None and process.stdout is not None  # noqa: PT018  (set by _start)
        descriptor, line = process.stdout.fileno(), b""
        deadline = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                break
            line += piece
        return line


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was not yet written has no reader any more
