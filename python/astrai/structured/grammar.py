"""A StructuredOutput as a grammar in the Lark dialect of llguidance."""

from __future__ import annotations

import json
import re

from astrai.sampling.structured_output import StructuredOutput

# Between the parts of a JSON text. Without a limit a model that falls into writing spaces would
# never leave them.
_JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"

# Any token may be chosen whose bytes the grammar allows. By default llguidance allows, where the
# grammar leaves no choice, only the token that a tokenizer of its own would produce. This stands
# last, so that it counts more than what a grammar says itself and line numbers stay as they are.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def is_gbnf(text: str) -> bool:
    """True for a grammar in GBNF and not in Lark."""
    return _GBNF_RULE.search(text) is not None


def grammar_text(output: StructuredOutput) -> str:
    """The grammar without OPTIONS; GBNF is returned as it stands."""
    if output.json_schema is not None:
        assert isinstance(output.json_schema, str)  # normalised when built
        return f"start: %json {_with_whitespace(output.json_schema)}"
    if output.regex is not None:
        from llguidance import regex_to_lark

        return f"start: OUTPUT\nOUTPUT: /{regex_to_lark(output.regex, use_ascii='d')}/"
    if output.choice is not None:
        # One expression: alternatives of a rule would each cost an item of the parser.
        return f"start: OUTPUT\nOUTPUT: /{'|'.join(map(_literal, output.choice))}/"
    assert output.grammar is not None  # one of the four is given
    return output.grammar


def _with_whitespace(schema: str) -> str:
    """The schema with a limit on white space, unless it has rules of its own for it."""
    value = json.loads(schema)
    options = value.setdefault("x-guidance", {})
    if isinstance(options, dict) and not {"whitespace_pattern", "whitespace_flexible"} & set(
        options
    ):
        options["whitespace_pattern"] = _JSON_WHITESPACE
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _literal(text: str) -> str:
    """A regular expression that matches `text` alone."""
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
        for character in text
    )
