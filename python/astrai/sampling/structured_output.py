"""The form that an output must have. No torch here: a client may build these cheaply."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_GRAMMAR_CHARS = 131_072
MAX_REGEX_CHARS = 16_384
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 131_072
MAX_SCHEMA_DEPTH = 64

_KINDS = ("json_schema", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutput:
    """The form of an output: exactly one of the fields below. Immutable and checked when built.

    json_schema  a JSON schema as a mapping or as JSON text, or True for any JSON object; at most
                 131072 characters as JSON and 64 levels deep. Held as JSON text.
    regex        a regular expression that the whole output matches (syntax of the Rust crate
                 `regex`, without look-around and back references); at most 16384 characters
    choice       1 to 4096 texts, none empty, of at most 131072 characters together: the output is
                 one of them
    grammar      a grammar in the Lark dialect of llguidance with a rule `start`, or in GBNF (told
                 apart by its `::=`) with a rule `root`; at most 131072 characters

    Raises TypeError for a value of another type, ValueError for one beyond these limits, for JSON
    that cannot be parsed and for text with lone surrogates. Whether a schema or grammar can be
    served is found out when a request is submitted.
    """

    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "nothing"
            raise ValueError(
                f"StructuredOutput: {found} given; expected exactly one of {', '.join(_KINDS)}"
            )
        if self.json_schema is not None:
            self._set("json_schema", _schema_text(self.json_schema))
        elif self.choice is not None:
            self._set("choice", _choices(self.choice))
        elif self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_CHARS)
        else:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_CHARS)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """Name of the field that was given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)


def _check_text(name: str, text: Any, limit: int) -> None:
    if not isinstance(text, str):
        raise TypeError(f"StructuredOutput: {name} is a {type(text).__name__}; expected a string")
    if not text:
        raise ValueError(f"StructuredOutput: {name} is an empty string; expected text")
    if len(text) > limit:
        raise ValueError(
            f"StructuredOutput: {name} has {len(text)} characters; expected at most {limit}"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise ValueError(
            f"StructuredOutput: {name} has a lone surrogate at {problem.start}; "
            "expected valid Unicode"
        ) from None


def _choices(value: Any) -> tuple[str, ...]:
    rule = "a list of strings"
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError(f"StructuredOutput: choice is a {type(value).__name__}; expected {rule}")
    try:
        choices = tuple(value)
    except TypeError:
        raise TypeError(
            f"StructuredOutput: choice is a {type(value).__name__}; expected {rule}"
        ) from None
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(
            f"StructuredOutput: choice has {len(choices)} entries; expected 1 to {MAX_CHOICES}"
        )
    for place, text in enumerate(choices):
        _check_text(f"choice[{place}]", text, MAX_CHOICE_CHARS)
    total = sum(map(len, choices))
    if total > MAX_CHOICE_CHARS:
        raise ValueError(
            f"StructuredOutput: choice has {total} characters; expected at most {MAX_CHOICE_CHARS}"
        )
    return choices


def _schema_text(schema: Any) -> str:
    """The schema as compact JSON text, in its own order, which is that of the output."""
    value = _parse_schema(schema) if isinstance(schema, str) else schema
    if value is True:
        value = {"type": "object"}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"StructuredOutput: json_schema is {value!r:.60}; expected a JSON object or True"
        )
    plain = _plain_json(value, MAX_SCHEMA_DEPTH)
    try:
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as problem:
        raise ValueError(
            f"StructuredOutput: json_schema cannot be written as JSON ({problem})"
        ) from None
    _check_text("json_schema", text, MAX_GRAMMAR_CHARS)
    return text


def _parse_schema(text: str) -> Any:
    _check_text("json_schema", text, MAX_GRAMMAR_CHARS)
    try:
        return json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as problem:
        raise ValueError(f"StructuredOutput: json_schema is not JSON ({problem})") from None


def _plain_json(value: Any, depth: int) -> Any:
    """`value` made of dicts, lists and scalars only, at most `depth` levels deep."""
    if isinstance(value, (Mapping, list, tuple)) and depth == 0:
        raise _too_deep()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"StructuredOutput: json_schema has the key {key!r:.60}; expected strings"
                )
        return {key: _plain_json(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_json(item, depth - 1) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(
        f"StructuredOutput: json_schema has a {type(value).__name__}; expected JSON values"
    )


def _too_deep() -> ValueError:
    return ValueError(
        f"StructuredOutput: json_schema is deeper than {MAX_SCHEMA_DEPTH} levels; expected at most "
        "that"
    )
