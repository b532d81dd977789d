"""A conversation with a model: its messages, and answers that stream to stdout."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from astrai.cli.console import note, write_text
from astrai.cli.rates import StreamTimer

if TYPE_CHECKING:
    from astrai.engine import LLM
    from astrai.sampling import SamplingParams

Message = dict[str, str]


class Conversation:
    """Messages so far and the engine that answers the next one.

    llm: engine with a chat template. params: how to sample every answer. system: first message, or
    None for what the template itself puts there. quiet: no token rates.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, *, system: str | None = None, quiet: bool = False
    ) -> None:
        self._llm = llm
        self._params = params
        self._quiet = quiet
        self.system = system
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [] if self.system is None else [_message("system", self.system)]

    def set_system(self, text: str) -> None:
        """Replaces the system message; the conversation starts over under it."""
        self.system = text
        self.reset()

    def save(self, path: Path) -> None:
        """Writes the messages to `path` as a JSON list of {"role", "content"}."""
        path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", "utf-8")

    def answer(self, text: str) -> bool:
        """Streams the model's answer to `text` and remembers both; False if Ctrl-C cut it short.

        A cut answer is remembered as far as it was shown. When the engine refuses the message (too
        long for the context, say) its ValueError passes through and nothing is remembered.
        """
        question = _message("user", text)
        pieces: list[str] = []
        timer = StreamTimer()
        with _ctrl_c_flag() as stopped:
            events = self._llm.stream([*self.messages, question], self._params)
            for event in events:
                timer.add(len(event.token_ids))
                pieces.append(event.text)
                write_text(event.text)
                if stopped.is_set():
                    events.close()  # frees the request's pages
                    break
        write_text("\n")
        note(timer.line(), quiet=self._quiet)
        self.messages += [question, _message("assistant", "".join(pieces))]
        return not stopped.is_set()


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


@contextmanager
def _ctrl_c_flag() -> Iterator[threading.Event]:
    """While the body runs, Ctrl-C sets the event yielded; a second Ctrl-C raises as usual.

    A KeyboardInterrupt could strike anywhere inside a step of the engine; a flag that is read
    between steps leaves it whole for the next message.
    """
    pressed = threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
