"""Collects the prompts of a command from its arguments, a file and stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from astrai.cli.errors import BadInputError


def stdin_is_terminal() -> bool:
    """True when a person types on stdin."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_stdin() -> str:
    """Returns all of stdin as text, less one trailing line end.

    Raises BadInputError when it is not UTF-8.
    """
    return _decode(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a prompt file that are not blank; `-` is stdin.

    Raises BadInputError when the file is not UTF-8 or has no such line, OSError when it cannot be
    read.
    """
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    lines = [line for line in _decode(data, str(path)).splitlines() if line.strip()]
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
    if not prompts and not stdin_is_terminal():
        prompts = [read_stdin()]
    if not prompts:
        raise BadInputError('no prompt; expected one, as in: astrai generate "Once upon a time"')
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
            raise BadInputError(f"{which} is empty; expected some text")
    return prompts


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{source} holds byte 0x{data[error.start]:02x} at offset {error.start}; expected UTF-8"
        ) from None
