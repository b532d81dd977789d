"""What the command line says, and which exit code it gives, when something goes wrong."""

from __future__ import annotations

import os
import sys
import traceback

import typer

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

# typer carries click inside itself in newer releases and depends on it in older ones; either way
# BadParameter, which both export, derives from the class that usage errors share.
CLICK_EXCEPTION: type[Exception] = next(
    cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException"
)

# Exceptions by which the library says that it was given something it cannot take.
_BAD_INPUT = (
    ValueError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


class BadInputError(ValueError):
    """Input that the command line itself refuses; the message is for the person who typed it."""


def debug_enabled() -> bool:
    """True when ASTRAI_DEBUG asks for tracebacks (any value but empty and 0)."""
    return os.environ.get("ASTRAI_DEBUG", "0") not in ("", "0")


def describe(error: BaseException) -> tuple[str, int]:
    """Returns the one line that describes `error` and the exit code that goes with it."""
    if isinstance(error, CLICK_EXCEPTION):
        return _click_message(error), int(getattr(error, "exit_code", EXIT_BAD_INPUT))
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        message = f"{os.fspath(error.filename)}: {error.strerror}"
    else:
        message = str(error)
    if isinstance(error, _BAD_INPUT):
        return _one_line(message) or type(error).__name__, EXIT_BAD_INPUT
    if isinstance(error, (RuntimeError, ImportError, OSError)) and message:
        return _one_line(message), EXIT_FAILURE
    if isinstance(error, MemoryError):
        return f"out of memory {_one_line(message)}".rstrip(), EXIT_FAILURE
    line = f"{type(error).__name__}: {_one_line(message)} (ASTRAI_DEBUG=1 shows where)"
    return line, EXIT_FAILURE


def report(error: BaseException) -> int:
    """Prints `error` to stderr, with its traceback if ASTRAI_DEBUG asks, and returns the exit code.

    The line goes past rich so that markup in a file name or a prompt is shown as it is.
    """
    if debug_enabled():
        traceback.print_exception(error)
    line, code = describe(error)
    sys.stderr.write(f"astrai: error: {line}\n")
    return code


def _click_message(error: Exception) -> str:
    """Message of a usage error, naming the command whose help explains more."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    if context is not None:
        message = f"{message.rstrip('.')} (see {context.command_path} --help)"
    return _one_line(message)


def _one_line(message: str) -> str:
    return " ".join(message.split())
