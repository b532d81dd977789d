"""The sampling strategies other than penalties.

A logit strategy changes the logits of all rows in place (`apply(logits)`), so greedy rows see it
too. A filter strategy shortens the candidate table of the rows that draw (`apply(table)`). Each is
built from the rows that use it, when the batch changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from astrai.sampling.candidates import CandidateTable

if TYPE_CHECKING:
    from astrai.sampling.batch_info import SamplingRow

# Probabilities come out of an fp32 exp: a mass this close to its limit has reached the limit.
MASS_TOLERANCE = 1e-6


class LogitStrategy(Protocol):
    """Changes logits [batch, V] fp32 in place."""

    def apply(self, logits: torch.Tensor) -> None: ...


class FilterStrategy(Protocol):
    """Shortens the rows of a candidate table."""

    def apply(self, table: CandidateTable) -> None: ...


class LogitBiasStrategy:
    """Add each row's biases to the logits of their ids."""

    def __init__(self, rows: Sequence[tuple[int, SamplingRow]], device: torch.device) -> None:
        entries = [
            (index, token_id, bias)
            for index, row in rows
            for token_id, bias in (row.params.logit_bias or {}).items()
        ]
        self._rows = torch.tensor([entry[0] for entry in entries], device=device)
        self._ids = torch.tensor([entry[1] for entry in entries], device=device)
        self._bias = torch.tensor([entry[2] for entry in entries], device=device)

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` [batch, V] fp32 in place."""
        logits[self._rows, self._ids] += self._bias


class MinTokensStrategy:
    """Rule out stop and end-of-sequence ids while a row is shorter than its min_tokens."""

    def __init__(self, rows: Sequence[tuple[int, SamplingRow]], device: torch.device) -> None:
        self._waiting = list(rows)
        self._device = device
        self._build()

    def _build(self) -> None:
        pairs = [(index, stop_id) for index, row in self._waiting for stop_id in row.stop_ids]
        self._rows = torch.tensor(
            [pair[0] for pair in pairs], dtype=torch.int64, device=self._device
        )
        self._ids = torch.tensor(
            [pair[1] for pair in pairs], dtype=torch.int64, device=self._device
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` [batch, V] fp32 in place."""
        still = [
            entry
            for entry in self._waiting
            if len(entry[1].output_ids) < entry[1].params.min_tokens
        ]
        if len(still) != len(self._waiting):
            self._waiting = still
            self._build()
        if still:
            logits[self._rows, self._ids] = -math.inf


class TemperatureStrategy:
    """(logit - largest logit) / temperature: the likeliest token of each row becomes 0.

    Subtracting first keeps every quotient at or below 0, so a tiny temperature cannot overflow.
    """

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        temperatures = [row.params.temperature for row in rows]
        self._is_one = all(value == 1.0 for value in temperatures)
        self._temperature = torch.tensor(
            [[value] for value in temperatures], dtype=torch.float32, device=device
        )

    def scale(self, logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """New [R, V] fp32 values of `logits` [R, V] with row maxima `largest` [R, 1]."""
        values = logits - largest
        # Dividing by one changes no bit; skipping it saves a pass over the vocabulary.
        return values if self._is_one else values.div_(self._temperature)


class TopKStrategy:
    """Keep each row's k likeliest tokens; of equal ones at the edge the lowest ids."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> None:
        limits = [
            row.params.top_k if 0 < row.params.top_k < vocab_size else vocab_size for row in rows
        ]
        self._limits = torch.tensor(limits, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size

    def apply(self, table: CandidateTable) -> None:
        """Shorten `table` and make its total the mass of what is left, for limited rows."""
        table.cut(self._limits)
        columns = torch.arange(table.weights.shape[1], device=table.weights.device)
        inside = columns < table.kept[:, None]
        mass = (table.weights * inside).sum(dim=1, keepdim=True)
        is_limited = (self._limits < self._vocab_size)[:, None]
        table.total = torch.where(is_limited, mass, table.total)


class TopPStrategy:
    """Keep the shortest prefix of the likeliest tokens that holds at least top_p of the mass.

    Source: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration", arXiv:1904.09751.
    The mass is that of the tokens which top_k has left.
    """

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        shares = [
            row.params.top_p - MASS_TOLERANCE if row.params.top_p < 1.0 else math.inf
            for row in rows
        ]
        self._shares = torch.tensor([[s] for s in shares], dtype=torch.float64, device=device)

    def apply(self, table: CandidateTable) -> None:
        """Shorten `table`."""
        mass_before = table.weights.cumsum(dim=1) - table.weights
        table.cut((mass_before < self._shares * table.total).sum(dim=1))


class MinPStrategy:
    """Drop tokens less likely than min_p times the likeliest token.

    Source: Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling", arXiv:2407.01082.
    """

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        floors = [
            math.log(row.params.min_p) - MASS_TOLERANCE if row.params.min_p else -math.inf
            for row in rows
        ]
        self._floors = torch.tensor([[f] for f in floors], dtype=torch.float32, device=device)

    def apply(self, table: CandidateTable) -> None:
        """Shorten `table`; its values are relative to the likeliest token's."""
        table.cut((table.values >= self._floors).sum(dim=1))
