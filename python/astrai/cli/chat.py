"""`astrai chat`: a conversation in the terminal, one answer, or messages from a pipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astrai.cli.conversation import Conversation
from astrai.cli.errors import EXIT_INTERRUPTED, BadInputError, describe
from astrai.cli.model import open_model
from astrai.cli.options import ModelOptions, SamplingOptions, expand_options
from astrai.cli.prompts import read_stdin, stdin_is_terminal, stdin_lines

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = """Examples:

astrai chat

astrai chat "Name three rivers in Europe."

astrai chat --system "Answer in French." --temperature 0

printf 'Hello!\\nWhat did I just say?\\n' | astrai chat
"""

HELP = """\
/help           this list
/reset          forget the conversation, keep the system message
/system TEXT    set the system message and forget the conversation (no TEXT: show it)
/save FILE      write the conversation to FILE as JSON
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer. Anything else is sent to the model."""


@expand_options
def chat(
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="MESSAGE",
            help="Answer this one message and exit; `-` reads it from stdin. Left out, a "
            "conversation starts.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message: how the model should behave."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bars and no token rates.")
    ] = False,
    *,
    model: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk with a language model.

    Starts a conversation that the model remembers; type /help in it for what it understands. With
    lines piped in, each line is one message. Answers go to stdout, all else to stderr.
    """
    if message == "-":
        message = read_stdin()
    if message is not None and not message.strip():
        raise BadInputError("the message is empty; expected some text")
    with open_model(model, max_batch=1, quiet=quiet) as llm:
        params = sampling.to_params(llm.generation_defaults)
        conversation = Conversation(llm, params, system=system, quiet=quiet)
        if message is not None:
            if not conversation.answer(message):
                raise typer.Exit(EXIT_INTERRUPTED)
        elif stdin_is_terminal():
            _talk(conversation, model.model)
        else:
            for line in stdin_lines():
                if line.strip() and not _handle(conversation, line):
                    return


def _talk(conversation: Conversation, model_name: str) -> None:
    """Reads messages from the terminal until /exit or the end of input."""
    _enable_line_editing()
    print(f"{model_name}: /help lists the commands, /exit or Ctrl-D leaves.")
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
            continue
        except EOFError:
            print()
            return
        if not line.strip():
            continue
        try:
            if not _handle(conversation, line):
                return
        except (ValueError, OSError) as error:
            # What was typed cannot be used; the conversation stands as it was before.
            print(f"error: {describe(error)[0]}")


def _handle(conversation: Conversation, line: str) -> bool:
    """Carries out one line of a conversation; False when it asks to leave.

    Raises BadInputError for a command that does not exist and what the engine raises for a message
    that it cannot take.
    """
    if not line.startswith("/"):
        conversation.answer(line)
        return True
    name, _, argument = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    commands: dict[str, Callable[[Conversation, str], None]] = {
        "/help": lambda conversation, argument: _reply(HELP),
        "/reset": lambda conversation, argument: conversation.reset(),
        "/system": _set_system,
        "/save": _save,
    }
    if name not in commands:
        known = ", ".join([*commands, "/exit"])
        raise BadInputError(f"unknown command {name}; expected one of {known}")
    commands[name](conversation, argument.strip())
    return True


def _set_system(conversation: Conversation, text: str) -> None:
    if text:
        conversation.set_system(text)
    else:
        _reply(conversation.system or "(no system message)")


def _save(conversation: Conversation, path: str) -> None:
    if not path:
        raise BadInputError("/save names no file; expected /save FILE")
    conversation.save(Path(path).expanduser())
    _reply(f"saved to {path}")


def _reply(text: str) -> None:
    """What a command has to say. Stdout is for answers alone."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _enable_line_editing() -> None:
    """Gives input() arrow keys and history where Python was built with readline."""
    try:
        import readline  # noqa: F401  (importing it is what turns it on)
    except ImportError:
        return
