"""The bytes that a vocabulary entry stands for.

A streaming decoder has to join bytes, not strings: a character may be spread over several tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

PieceDecoder = Callable[[str], bytes]

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE vocabularies.

    Printable bytes stand for themselves; the others are moved to code points from 256 on, so that
    no vocabulary entry holds white space or control characters.
    Source: Radford et al. 2019, GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = sorted(set(range(256)) - set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_ALPHABET = byte_level_alphabet()


def decode_byte_level(piece: str) -> bytes:
    """Bytes of a byte-level entry; one with a character outside the alphabet is literal text."""
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8")


def decode_literal(piece: str) -> bytes:
    """An entry that stands for its own text."""
    return piece.encode("utf-8")


def decode_byte_fallback(piece: str) -> bytes:
    """<0xE2> is the byte 0xE2, anything else its own text."""
    match = _BYTE_FALLBACK.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.encode("utf-8")


def from_decoder_state(state: Mapping[str, Any] | None) -> tuple[PieceDecoder, bool]:
    """How the decoder section of a tokenizer.json turns an entry into bytes.

    Returns  (decoder of one entry, whether one leading space of a whole text is dropped)
    Raises   ValueError naming a decoder that cannot be applied to one entry at a time
    """
    steps: list[Mapping[str, Any]] = []
    if state is not None:
        steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    replacements: list[tuple[str, str]] = []
    last: PieceDecoder = decode_literal
    strips = False
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            last = decode_byte_level
        elif kind == "ByteFallback":
            last = decode_byte_fallback
        elif kind == "Replace" and "String" in step.get("pattern", {}):
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            strips = strips or step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step.get("content") == " " and step.get("stop") == 0:
            strips = strips or step.get("start", 0) > 0
        elif kind != "Fuse":
            raise ValueError(
                f"tokenizer: decoder {kind!r}; expected ByteLevel, ByteFallback, Metaspace, "
                "Replace of a string, Strip of leading spaces or Fuse"
            )
    if not replacements:
        return last, strips

    def decode(piece: str) -> bytes:
        for old, new in replacements:
            piece = piece.replace(old, new)
        return last(piece)

    return decode, strips
