"""Penalties on tokens that were seen before.

All three work on the ids that a row has seen (a few hundred) and never on the whole vocabulary:
gather, change, scatter. An id that is listed twice is written twice with the same value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from astrai.sampling.batch_info import SamplingRow


class TokenHistory:
    """The ids each penalised row has seen, and how often each id stands in its output.

    row_index      [R, 1] int64, the rows' places in the batch
    ids            [R, capacity] int64; columns past a row's length repeat a harmless id
    output_counts  [R, V] fp32, how often an id was generated (the prompt does not count)
    """

    def __init__(
        self,
        rows: Sequence[tuple[int, SamplingRow]],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        # The prompt matters to the repetition penalty only.
        seen = [
            (row.prompt_ids if row.params.repetition_penalty != 1.0 else []) + row.output_ids
            for _, row in rows
        ]
        self.width = max((len(ids) for ids in seen), default=0)
        capacity = max(64, 2 * self.width)
        # A padding column repeats the row's first id (same value written twice). A row without
        # any id pads with id 0, whose count is 0 unless it was generated: nothing changes.
        table = [ids + [ids[0] if ids else 0] * (capacity - len(ids)) for ids in seen]
        self.row_index = torch.tensor([[index] for index, _ in rows], device=device)
        self.ids = torch.tensor(table, dtype=torch.int64, device=device)
        self._lengths = torch.tensor([len(ids) for ids in seen], device=device)
        self._arange = torch.arange(len(rows), device=device)
        self.output_counts = torch.zeros(len(rows), vocab_size, device=device)
        for i, (_, row) in enumerate(rows):
            if row.output_ids:
                output = torch.tensor(row.output_ids, dtype=torch.int64, device=device)
                self.output_counts[i] = torch.bincount(output, minlength=vocab_size).float()

    def seen_ids(self) -> torch.Tensor:
        """[R, width] int64: every id seen by any row, padded."""
        return self.ids[:, : self.width]

    def append(self, tokens: torch.Tensor) -> None:
        """Add each row's new token; `tokens` [batch] int64 in batch order."""
        if self.width == self.ids.shape[1]:
            self.ids = torch.cat([self.ids, self.ids[:, :1].expand_as(self.ids)], dim=1)
        new = tokens[self.row_index[:, 0]]
        self.ids[self._arange, self._lengths] = new
        self._lengths += 1
        self.width += 1
        self.output_counts[self._arange, new] += 1.0


class _PenaltyStrategy(ABC):
    """Shared gather and scatter; a subclass says how a seen logit changes."""

    field: str

    def __init__(
        self, rows: Sequence[tuple[int, SamplingRow]], history: TokenHistory, device: torch.device
    ) -> None:
        self._history = history
        self._penalty = torch.tensor(
            [[getattr(row.params, self.field)] for _, row in rows], device=device
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` [batch, V] fp32 in place."""
        history = self._history
        ids = history.seen_ids()
        if ids.shape[1] == 0:
            return
        values = logits[history.row_index, ids]
        logits[history.row_index, ids] = self._changed(values, ids)

    @abstractmethod
    def _changed(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The new logits of `ids`, both [batch, ids], whose logits are `values`."""


class RepetitionPenaltyStrategy(_PenaltyStrategy):
    """Divide positive and multiply negative logits of ids in prompt or output by the penalty.

    Source: Keskar et al. 2019, "CTRL", arXiv:1909.05858, in the sign-aware form in common use.
    """

    field = "repetition_penalty"

    def _changed(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # A row that shares the table without asking for this penalty has factor 1: unchanged.
        return torch.where(values > 0, values / self._penalty, values * self._penalty)


class FrequencyPenaltyStrategy(_PenaltyStrategy):
    """Subtract penalty * (times the id was generated)."""

    field = "frequency_penalty"

    def _changed(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return values - self._penalty * self._history.output_counts.gather(1, ids)


class PresencePenaltyStrategy(_PenaltyStrategy):
    """Subtract the penalty once from every id that was generated."""

    field = "presence_penalty"

    def _changed(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return values - self._penalty * (self._history.output_counts.gather(1, ids) > 0)
