"""The `astrai` command: its subcommands, its version, and how failures end it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from astrai.cli import bench, chat, console, errors, generate, models

app = typer.Typer(
    name="astrai",
    help="Run language models on this machine.\n\n"
    "Without --model, commands use the small default model, smollm2-135m; `astrai models` shows "
    "how to get it and what else can be run.",
    epilog="Every command explains itself: astrai COMMAND --help. "
    "Full tracebacks of failures: ASTRAI_DEBUG=1.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command, _examples in (
    (generate.generate, generate.EXAMPLES),
    (chat.chat, chat.EXAMPLES),
    (bench.bench, bench.EXAMPLES),
    (models.models, models.EXAMPLES),
):
    # Paragraphs as single lines: the terminal's width, not the source's, breaks them.
    _paragraphs = (inspect.getdoc(_command) or "").split("\n\n")
    _help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in _paragraphs)
    app.command(_command.__name__, help=_help, epilog=_examples)(_command)


def _print_version(asked: bool) -> None:
    if asked:
        from astrai import __version__

        print(f"astrai {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Shows the help when no command is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    arguments: words after `astrai`; default sys.argv[1:].
    Returns 0 for success, 2 for input that cannot be used (also unknown options), 130 after Ctrl-C
    and 1 for any other failure. Failures print one line on stderr, a traceback only with
    ASTRAI_DEBUG=1.
    """
    console.prepare_streams()
    if sys.stdout is None:
        return errors.report(errors.BadInputError("stdout is closed; expected one to write to"))
    try:
        words = None if arguments is None else list(arguments)
        result = app(args=words, prog_name="astrai", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("\n")
        return errors.EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has gone (`astrai ... | head`): nobody is left to be told. Python
        # flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.EXIT_FAILURE
    except Exception as error:
        return errors.report(error)
    return result if isinstance(result, int) else 0
