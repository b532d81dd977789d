"""Options that several commands share, each described once.

A command takes a group as one parameter, typed with one of the dataclasses below, and is wrapped in
`expand_options`, which shows typer the group's fields as separate options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from astrai.cli.errors import BadInputError

DEFAULT_MODEL = "smollm2-135m"

_MODEL = "Model"
_SAMPLING = "Sampling"


@dataclass(frozen=True)
class ModelOptions:
    """Which model to load and how to run it."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Alias (see `astrai models`), path of a .gguf file, or path of a Hugging Face "
            "directory.",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT_MODEL
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="Type to hold the weights in: auto, float32, bfloat16 or float16. auto takes the "
            "type the model was stored in, or the nearest one the device computes well.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE", help="Where to run: auto, cpu or cuda.", rich_help_panel=_MODEL
        ),
    ] = "auto"
    attn_backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Attention implementation: cpu, torch_native, cuda or flash. Left out, the best "
            "one for the device is chosen; named, it is used or the command fails.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    max_context: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Longest prompt plus answer to allow. Left out, the model's own limit.",
            rich_help_panel=_MODEL,
        ),
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen and when to stop; one field for each sampling parameter."""

    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Longest answer, in tokens.", rich_help_panel=_SAMPLING
        ),
    ] = 256
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help="Randomness: 0 always takes the likeliest token, 1 follows the model's "
            "probabilities. Default: the model's own advice, else 1.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Keep the likeliest tokens that together hold probability P (0 to 1).",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="K", help="Keep the K likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Drop tokens less likely than P times the likeliest one.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Above 1: divide the logits of tokens already seen, prompt included, by X.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Subtract X from a token's logit for each time it was generated.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Subtract X once from the logit of every token generated so far.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Seed of the random choices: the same seed gives the same text.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    min_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Do not let the answer end before N tokens.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End the answer before this text; may be given more than once.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID",
            help="End the answer at this token; may be given more than once.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on past the model's end-of-text token.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=X",
            help="Add X to the logit of token ID; may be given more than once.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    bad_word: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Never write this text, with or without a space before it; may be given more than "
            "once.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    allowed_token_id: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID",
            help="Choose among the tokens so named alone; may be given more than once.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answer in JSON that fits the JSON schema in FILE.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Answer with a text that matches this regular expression as a whole.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Answer with this text; given several times, with one of them.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answer with a text that the Lark or GBNF grammar in FILE describes.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    show_special: Annotated[
        bool,
        typer.Option(
            "--show-special",
            help="Show special tokens such as <|im_end|> in the text.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False
    include_stop: Annotated[
        bool,
        typer.Option(
            "--include-stop",
            help="Keep the --stop text that ended the answer.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False

    def to_params(self, defaults: dict[str, Any] | None = None, **more: Any) -> Any:
        """Returns the SamplingParams that these options describe.

        `defaults` are the model's recommended values, used where an option was left out; `more` are
        parameters that only one command has (n, best_of, logprobs, prompt_logprobs). Raises
        ValueError for values that SamplingParams refuses and BadInputError for a malformed
        --logit-bias.
        """
        from astrai.sampling import SamplingParams

        chosen: dict[str, Any] = {
            name: value
            for name in (
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
                "seed",
            )
            if (value := getattr(self, name)) is not None
        }
        fixed = {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_id or ()),
            "ignore_eos": self.ignore_eos,
            "logit_bias": parse_logit_bias(self.logit_bias),
            "bad_words": tuple(self.bad_word or ()),
            "allowed_token_ids": self.allowed_token_id or None,
            "structured": self._structured(),
            "skip_special_tokens": not self.show_special,
            "include_stop_str_in_output": self.include_stop,
        }
        return SamplingParams(**{**(defaults or {}), **chosen, **fixed, **more})

    def _structured(self) -> Any:
        """The StructuredOutput that was asked for, or None."""
        given: dict[str, Any] = {
            "json_schema": self.json_schema,
            "regex": self.regex,
            "choice": tuple(self.choice) if self.choice else None,
            "grammar": self.grammar,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if not given:
            return None
        if len(given) > 1:
            names = " and ".join("--" + name.replace("_", "-") for name in given)
            raise BadInputError(f"{names} given; expected at most one of them")
        from astrai.sampling import StructuredOutput

        for name, value in given.items():
            if isinstance(value, Path):
                try:
                    given[name] = value.read_text("utf-8")
                except UnicodeDecodeError:
                    raise BadInputError(f"{value}: not UTF-8 text; expected a {name}") from None
        return StructuredOutput(**given)


def parse_logit_bias(entries: list[str] | None) -> dict[int, float] | None:
    """Turns ["42=1.5", ...] into {42: 1.5, ...}; None where there are none.

    Raises BadInputError naming the entry that is not ID=X.
    """
    if not entries:
        return None
    biases: dict[int, float] = {}
    for entry in entries:
        token_id, separator, value = entry.partition("=")
        try:
            if not separator:
                raise ValueError
            biases[int(token_id)] = float(value)
        except ValueError:
            raise BadInputError(
                f"--logit-bias {entry!r}; expected ID=X, a token id and a number, such as 42=-5"
            ) from None
    return biases


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command so that typer sees the fields of its option groups as options of their own.

    Every parameter of `command` that is typed with a dataclass is a group; the wrapper collects the
    fields' values into an instance before the call.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            shown = parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.append(shown)
            continue
        assert isinstance(hint, type)
        groups[parameter.name] = hint
        field_hints = get_type_hints(hint, include_extras=True)
        for field in fields(hint):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=field_hints[field.name],
                )
            )

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        collected = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **collected)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
