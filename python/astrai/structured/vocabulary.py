"""A tokenizer's vocabulary in the form that llguidance takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

# llguidance takes this byte as the mark of a special token. It never occurs in UTF-8.
_MARK = 0xFF


class PieceSource(Protocol):
    """The part of a tokenizer that is needed."""

    def id_to_piece(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        ...


def text_pieces(
    tokenizer: PieceSource, vocab_size: int, control_ids: Collection[int]
) -> list[bytes]:
    """The bytes of ids 0 .. vocab_size; empty for ids that no grammar may use as text.

    Those are `control_ids` (whatever they are spelled like) and pieces that hold the byte 0xFF.
    """
    control = frozenset(control_ids)
    pieces = [
        b"" if token_id in control else tokenizer.id_to_piece(token_id)
        for token_id in range(vocab_size)
    ]
    return [b"" if _MARK in piece else piece for piece in pieces]


class TokenizerWrapper:
    """What `llguidance.LLTokenizer` reads.

    Without an end-of-sequence id it adds one, vocab_size: its bit of a mask says that the output
    may end here, and no token of the model is mixed up with it.
    """

    is_tokenizer_wrapper = True
    eos_token_id: int | None = None
    bos_token_id: int | None = None

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.tokens = pieces
        self.special_token_ids: list[int] = []

    def __call__(self, text: str) -> list[int]:
        raise RuntimeError("structured output: text is tokenised; expected masks alone to be used")
