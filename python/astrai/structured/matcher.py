"""Follows one sample through its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarMatcher:
    """Where one sample is in its grammar.

    The state is a function of the output's tokens: `follow` takes those that it has not seen yet,
    so that a step that is run again or a sample that is computed again cannot advance it twice.

    error  what went wrong, None while all is well. Such a matcher allows nothing.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_followed = 0
        self._mask: npt.NDArray[np.int32] | None = None
        self.error: str | None = None

    @property
    def num_words(self) -> int:
        """32-bit words of a mask: one bit for each id and one more for the end."""
        return mask_words(self._vocab_size)

    def follow(self, output_ids: Sequence[int]) -> None:
        """Take note of the output so far; ids that were seen before are not looked at again."""
        while self._num_followed < len(output_ids) and self.error is None:
            token_id = output_ids[self._num_followed]
            self._num_followed += 1
            self._mask = None
            if not self._matcher.consume_token(token_id):
                self._fail()

    def may_end(self) -> bool:
        """True when the output so far is complete."""
        word, bit = divmod(self._vocab_size, 32)
        return bool(int(self._current()[word]) >> bit & 1)

    def must_end(self) -> bool:
        """True when the output so far is complete and no token may follow."""
        bits = int.from_bytes(self._current().tobytes(), "little")
        return bits == 1 << self._vocab_size

    def fill(self, words: npt.NDArray[np.int32], end_ids: Iterable[int]) -> None:
        """Write the mask of the next token, bit i of [num_words] int32 for id i.

        end_ids are allowed besides where the output may end.
        """
        words[:] = self._current()
        word, bit = divmod(self._vocab_size, 32)
        unsigned = words.view(np.uint32)
        if self.may_end():
            unsigned[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
            for end_id in end_ids:
                unsigned[end_id // 32] |= np.uint32(1 << end_id % 32)

    def _current(self) -> npt.NDArray[np.int32]:
        """llguidance's mask after the tokens followed so far; all zero after an error."""
        if self._mask is None:
            self._mask = np.zeros(self.num_words, dtype=np.int32)
            if self.error is None:
                self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
                if self._matcher.is_error():
                    self._fail()
        return self._mask

    def _fail(self) -> None:
        self.error = " ".join(self._matcher.get_error().partition("\n<")[0].split())[:300]
        self._mask = np.zeros(self.num_words, dtype=np.int32)


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask over `vocab_size` ids and the end."""
    return vocab_size // 32 + 1
