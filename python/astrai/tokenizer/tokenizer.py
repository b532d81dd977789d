"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from astrai.tokenizer.pieces import PieceDecoder

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)


# The library takes ids as unsigned 32-bit integers.
_MAX_ID = 2**32 - 1


class Tokenizer:
    """A vocabulary with its merges.

    bos_token_id, eos_token_id  ids of the tokens that begin and end a text, or None
    special_ids                 control tokens, which decode leaves out unless told otherwise
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        decode_piece: PieceDecoder,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        add_bos: bool | None = None,
        add_eos: bool = False,
        strip_leading_space: bool = False,
        more_pieces: Mapping[int, bytes] | None = None,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`.

        decode_piece         bytes of a vocabulary entry that is not an added token
        add_bos              whether encode adds BOS and, with add_eos, EOS; None leaves both to
                             the backend's post-processor
        strip_leading_space  whether decode drops one space at the start, which encode put there
        more_pieces          bytes of ids that the backend does not know
        Raises ValueError if BOS or EOS is to be added and has no id.
        """
        for what, wanted, token_id in (
            ("BOS", add_bos, bos_token_id),
            ("EOS", add_eos, eos_token_id),
        ):
            if wanted and token_id is None:
                raise ValueError(f"tokenizer: {what} is to be added, but has no id; expected one")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._decode_piece = decode_piece
        self._add_bos, self._add_eos = add_bos, add_eos
        self._strip_leading_space = strip_leading_space
        self._warned_of_bos = False
        added = backend.get_added_tokens_decoder()
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces = {i: token.content.encode("utf-8") for i, token in added.items()}
        self._pieces.update(more_pieces or {})

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; ids below it may be unused."""
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        return max(max(ids, default=-1), max(self._pieces, default=-1)) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Control tokens that are spelled out in the text become their ids. add_special_tokens adds
        BOS and EOS where the model's files ask for it; a text that spells out BOS itself does not
        get a second one (a warning is logged the first time).
        Raises TypeError for anything but a str, ValueError for text with lone surrogates.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode: text {type(text).__name__}; expected str")
        own_rule = self._add_bos is not None
        try:
            encoding = self._backend.encode(
                text, add_special_tokens=add_special_tokens and not own_rule
            )
        # The library says no more than "must be str" about text that has no UTF-8.
        except TypeError:
            _check_unicode(text)
            raise
        ids: list[int] = encoding.ids
        if not add_special_tokens:
            return ids
        if own_rule:
            bos = [self.bos_token_id] if self._add_bos and self.bos_token_id is not None else []
            eos = [self.eos_token_id] if self._add_eos and self.eos_token_id is not None else []
            ids = [*bos, *ids, *eos]
        if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            if not self._warned_of_bos:
                logger.warning("encode: the text begins with BOS; a second one is not added")
                self._warned_of_bos = True
            del ids[0]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        Equal to joining id_to_piece of the ids and decoding the bytes.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join([self.id_to_piece(i) for i in ids if i not in skipped])
        if self._strip_leading_space and text.startswith(b" "):
            text = text[1:]
        return text.decode("utf-8", errors="replace")

    def id_to_piece(self, token_id: int) -> bytes:
        """The exact bytes that a token stands for; empty for an id outside the vocabulary, which
        the padded rows of an embedding can produce."""
        piece = self._pieces.get(token_id)
        if piece is None:
            entry = self.token_text(token_id)
            if entry is None:
                return b""
            piece = self._pieces[token_id] = self._decode_piece(entry)
        return piece

    def token_to_id(self, token: str) -> int | None:
        """Id of a vocabulary entry as it is spelled in the files, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_text(self, token_id: int | None) -> str | None:
        """Spelling of an id in the files; None for None or an unknown id."""
        if token_id is None or not 0 <= token_id <= _MAX_ID:
            return None
        text: str | None = self._backend.id_to_token(token_id)
        return text


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise ValueError(
            f"encode: text has a lone surrogate at {problem.start}; expected valid Unicode"
        ) from None
