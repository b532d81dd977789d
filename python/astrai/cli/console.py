"""Terminal output: answers on stdout, everything about them on stderr.

Keeping the two apart lets `astrai generate ... > file` hold the text alone. Bars are drawn only
where stderr is a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

ProgressCallback = Callable[[int, int], None]


def prepare_streams() -> None:
    """Makes text that a terminal's encoding cannot show come out as "?" instead of failing, and
    everything about answers vanish where stderr is closed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open to the end
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def stderr_console() -> Console:
    """A console on the current stderr; made anew since tests and callers replace sys.stderr."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def write_text(text: str) -> None:
    """Writes a piece of an answer to stdout and shows it at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(line: str, *, quiet: bool = False) -> None:
    """Writes a line about the work (rates, hints) to stderr, dimmed on a terminal."""
    if not quiet:
        stderr_console().print(line, style="dim", markup=False)


@contextmanager
def progress_bar(label: str, *, quiet: bool = False) -> Iterator[ProgressCallback]:
    """Shows a bar on stderr while the body runs and yields the callback that moves it.

    The callback takes (done, total) in any one unit. Without a terminal, or when `quiet`, it does
    nothing. The bar vanishes at the end.
    """
    console = stderr_console()
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield update
