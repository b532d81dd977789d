"""The sampling strategy that keeps an output in its form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from astrai.sampling.batch_info import SamplingRow


class TokenMatcher(Protocol):
    """The part of `structured.matcher.GrammarMatcher` that sampling needs."""

    @property
    def num_words(self) -> int: ...
    def follow(self, output_ids: Sequence[int]) -> None: ...
    def fill(self, words: npt.NDArray[np.int32], end_ids: Iterable[int]) -> None: ...


class StructuredOutputStrategy:
    """Rule out every id that a row's grammar does not allow next.

    Masks are packed, one bit for each id, and unpacked on the logits' device: a step copies
    vocabulary / 8 bytes for each row that has a grammar.
    """

    def __init__(
        self, rows: Sequence[tuple[int, SamplingRow]], vocab_size: int, device: torch.device
    ) -> None:
        self._matched = [(row, row.matcher) for _, row in rows if row.matcher is not None]
        self._vocab_size = vocab_size
        num_words = self._matched[0][1].num_words
        # The page-locked buffer may be refilled at the next step: the tokens chosen with it were
        # read from the device by then.
        self._packed = torch.zeros(
            len(rows), num_words, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._words = self._packed.numpy()
        self._rows = torch.tensor([index for index, _ in rows], device=device)
        self._shifts = torch.arange(32, dtype=torch.int32, device=device)

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` [batch, V] fp32 in place."""
        for words, (row, matcher) in zip(self._words, self._matched, strict=True):
            matcher.follow(row.output_ids)
            matcher.fill(words, row.stop_ids)
        forbidden = self._unpacked(logits.device)
        if len(self._matched) == len(logits):
            logits.masked_fill_(forbidden, -math.inf)
        else:
            logits[self._rows] = logits[self._rows].masked_fill_(forbidden, -math.inf)

    def _unpacked(self, device: torch.device) -> torch.Tensor:
        """[rows, V] bool on `device`, True for ids that are not allowed."""
        if device.type == "cpu":
            # NumPy unpacks bits much faster than shifts do; words are little-endian here.
            octets = self._words.view(np.uint8)
            bits = np.unpackbits(octets, axis=1, count=self._vocab_size, bitorder="little")
            return torch.from_numpy(bits).view(torch.bool).logical_not_()
        words = self._packed.to(device, non_blocking=True)
        return unpack_forbidden(words, self._shifts, self._vocab_size)


def unpack_forbidden(words: torch.Tensor, shifts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[rows, vocab_size] bool, True where the bit of `words` [rows, W] int32 is 0.

    shifts  0 .. 31 [32] int32 on the device of `words`
    """
    bits = (words[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size] == 0
