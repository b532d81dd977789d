"""Strategies that make tokens impossible: all but some, and the ends of bad words."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from astrai.sampling.batch_info import SamplingRow


class AllowedTokenIdsStrategy:
    """Rule out every id that a row's allowed_token_ids does not list.

    A mask of one byte for each row and id: its size does not depend on how many ids are listed.
    """

    def __init__(
        self, rows: Sequence[tuple[int, SamplingRow]], vocab_size: int, device: torch.device
    ) -> None:
        self._rows = torch.tensor([index for index, _ in rows], device=device)
        forbidden = torch.ones(len(rows), vocab_size, dtype=torch.bool)
        for place, (_, row) in enumerate(rows):
            ids = torch.frombuffer(row.params.allowed_ids_array, dtype=torch.int64)
            forbidden[place, ids] = False
        self._forbidden = forbidden.to(device)

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` [batch, V] fp32 in place."""
        if len(self._rows) == len(logits):
            logits.masked_fill_(self._forbidden, -math.inf)
        else:
            logits[self._rows] = logits[self._rows].masked_fill_(self._forbidden, -math.inf)


class BadWordsStrategy:
    """Rule out the last id of each bad word whose other ids are what a row's output ends with.

    Words of one id are ruled out at every step. The others are found by the id before the last, so
    that a step looks only at words which the newest token may have led to.
    """

    def __init__(self, rows: Sequence[tuple[int, SamplingRow]], device: torch.device) -> None:
        self._device = device
        single = [(index, ids[0]) for index, row in rows for ids in row.bad_ids if len(ids) == 1]
        self._single = self._places(single)
        self._longer: list[tuple[int, SamplingRow, dict[int, list[tuple[int, ...]]]]] = []
        for index, row in rows:
            by_id: dict[int, list[tuple[int, ...]]] = defaultdict(list)
            for ids in row.bad_ids:
                if len(ids) > 1:
                    by_id[ids[-2]].append(ids)
            if by_id:
                self._longer.append((index, row, dict(by_id)))

    def _places(self, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not pairs:
            return None
        rows, ids = torch.tensor(pairs, dtype=torch.int64, device=self._device).unbind(dim=1)
        return rows, ids

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` [batch, V] fp32 in place."""
        completed = [
            (index, ids[-1])
            for index, row, by_id in self._longer
            if row.output_ids
            for ids in by_id.get(row.output_ids[-1], ())
            if tuple(row.output_ids[1 - len(ids) :]) == ids[:-1]
        ]
        for places in (self._single, self._places(completed)):
            if places is not None:
                logits[places] = -math.inf
