"""Token ids to text, one token at a time, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import Protocol


class PieceSource(Protocol):
    """The part of a tokenizer that a detokenizer needs."""

    def id_to_piece(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        ...


class Detokenizer:
    """Decodes one sample's tokens as they come.

    A token is a piece of bytes, and a character may be spread over several tokens: bytes that
    could still become a character are kept back. Bytes that can no longer become one turn into
    U+FFFD at once, incomplete ones at `flush`, as in a decode of all bytes together.
    """

    def __init__(
        self,
        tokenizer: PieceSource,
        special_ids: Collection[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._piece = tokenizer.id_to_piece
        self._skipped = frozenset(special_ids) if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._piece(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", final=True)
