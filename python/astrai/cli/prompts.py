"""Collects the prompts of a command from its arguments, a file and stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from astrai.cli.errors import BadInputError


def stdin_is_terminal() -> bool:
    """True when a person types on stdin."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_stdin() -> str:
    """Returns all of stdin as text, less one trailing line end; closed, it is empty.

    Raises BadInputError when it is not UTF-8.
    """
    return _without_line_end(_decode(_stdin_bytes(), "stdin"))


def stdin_lines() -> Iterator[str]:
    """Yields the lines of stdin, less their ends, as they come.

    Raises BadInputError at one that is not UTF-8.
    """
    lines = sys.stdin.buffer if sys.stdin is not None else ()
    for number, line in enumerate(lines, start=1):
        yield _without_line_end(_decode(line, f"line {number} of stdin"))


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a prompt file that are not blank; `-` is stdin.

    Raises BadInputError when the file is not UTF-8 or has no such line, OSError when it cannot be
    read.
    """
    data = _stdin_bytes() if str(path) == "-" else path.read_bytes()
    lines = [_without_line_end(line) for line in _decode(data, str(path)).split("\n")]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise BadInputError(f"--file {path} holds no prompt; expected one prompt a line")
    return lines


def collect_prompts(arguments: list[str], file: Path | None) -> list[str]:
    """Returns the prompts in the order: arguments, then the file's lines.

    An argument `-` stands for the text on stdin, as does giving no prompt at all with something
    piped in. Raises BadInputError for an empty prompt and where there is none.
    """
    prompts = [read_stdin() if argument == "-" else argument for argument in arguments]
    if file is not None:
        prompts += read_lines(file)
    if not prompts and sys.stdin is not None and not stdin_is_terminal():
        prompts = [read_stdin()]
    if not prompts:
        raise BadInputError('no prompt; expected one, as in: astrai generate "Once upon a time"')
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
            raise BadInputError(f"{which} is empty; expected some text")
    return prompts


def _stdin_bytes() -> bytes:
    return sys.stdin.buffer.read() if sys.stdin is not None else b""


def _without_line_end(text: str) -> str:
    # Not splitlines: a form feed or U+2028 inside a prompt is part of it.
    return text.removesuffix("\n").removesuffix("\r")


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{source} holds byte 0x{data[error.start]:02x} at offset {error.start}; expected UTF-8"
        ) from None
