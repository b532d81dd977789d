"""Tokenizer and chat template of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from astrai.tokenizer.chat import ChatTemplate
from astrai.tokenizer.json_file import read_json_object
from astrai.tokenizer.pieces import from_decoder_state
from astrai.tokenizer.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, with BOS, EOS and whether to add them from
    tokenizer_config.json (else the post-processor of tokenizer.json decides).

    Raises FileNotFoundError without a tokenizer.json, ValueError naming the file if it is
    malformed or uses a decoder that cannot stream.
    """
    from tokenizers import Tokenizer as Backend

    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; expected the tokenizer of the model")
    try:
        backend = Backend.from_file(str(path))
    # The library raises plain Exception for anything that it cannot parse.
    except Exception as problem:
        raise ValueError(f"{path}: not a tokenizer ({problem})") from None
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    try:
        decode_piece, strips = from_decoder_state(decoder)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from None
    config = _read_optional(directory / CONFIG_FILE)
    ids: dict[str, int | None] = {}
    for name, text in _special_tokens(directory, config).items():
        ids[name] = backend.token_to_id(text)
    add_bos = config.get("add_bos_token")
    add_eos = config.get("add_eos_token")
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    explicit = isinstance(add_bos, bool) or isinstance(add_eos, bool)
    return Tokenizer(
        backend,
        decode_piece,
        bos_token_id=bos,
        eos_token_id=eos,
        add_bos=(add_bos is True and bos is not None) if explicit else None,
        add_eos=explicit and add_eos is True and eos is not None,
        strip_leading_space=strips,
    )


def read_chat_template(directory: Path) -> ChatTemplate:
    """The chat templates: chat_template.jinja and those in additional_chat_templates/, else
    `chat_template` of tokenizer_config.json, a string or a list of named ones.

    Raises ValueError naming the file if the entry is malformed.
    """
    config = _read_optional(directory / CONFIG_FILE)
    special: dict[str, str] = {}
    for name, text in _special_tokens(directory, config).items():
        special[name] = text
    templates = {
        path.stem: path.read_text("utf-8")
        for path in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))
    }
    separate = directory / TEMPLATE_FILE
    if separate.is_file():
        templates["default"] = separate.read_text("utf-8")
    if not templates:
        templates = _inline_templates(config.get("chat_template"), directory / CONFIG_FILE)
    return ChatTemplate(templates, special)


def _inline_templates(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    rule = "a template or a list of objects with name and template"
    if not isinstance(value, list):
        raise ValueError(f"{path}: chat_template is a {type(value).__name__}; expected {rule}")
    templates: dict[str, str] = {}
    for entry in value:
        name = entry.get("name") if isinstance(entry, dict) else None
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(f"{path}: chat_template has the entry {entry!r:.60}; expected {rule}")
        templates[name] = text
    return templates


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Texts of bos_token, eos_token and the like; tokenizer_config.json counts first."""
    found: dict[str, str] = {}
    for values in (_read_optional(directory / SPECIAL_TOKENS_FILE), config):
        for name, value in values.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
