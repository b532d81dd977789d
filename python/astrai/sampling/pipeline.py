"""The strategies that one batch needs, and no others, in the order in which they act."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from astrai.sampling.bans import AllowedTokenIdsStrategy, BadWordsStrategy
from astrai.sampling.candidates import CandidateTable, draw_from_vocabulary, row_mass
from astrai.sampling.penalties import (
    FrequencyPenaltyStrategy,
    PresencePenaltyStrategy,
    RepetitionPenaltyStrategy,
    TokenHistory,
)
from astrai.sampling.strategies import (
    FilterStrategy,
    LogitBiasStrategy,
    LogitStrategy,
    MinPStrategy,
    MinTokensStrategy,
    TemperatureStrategy,
    TopKStrategy,
    TopPStrategy,
)
from astrai.sampling.structured import StructuredOutputStrategy

if TYPE_CHECKING:
    from astrai.sampling.batch_info import SamplingBatchInfo, SamplingRow

# First guess at how many candidates a filter leaves; eight times as many when it was too few.
# A top-k filter needs k and one more, which shows whether a tie reaches past the edge.
_NUCLEUS_WIDTH = 256
_WIDTH_GROWTH = 8
# Covers the rounding of floors to fp32 and the tolerances of the filters.
_FLOOR_MARGIN = 1e-3


class SamplingPipeline:
    """Logit strategies for every row, then temperature, filters and a draw for rows that draw.

    Where a strategy is added: write the class, give it a place in `_logit_strategies` or
    `build_filters`, and keep it out of batches that do not use it. Filters act on rows that use
    at least one filter; a row's result never depends on which other rows are there.
    """

    def __init__(self, info: SamplingBatchInfo) -> None:
        self._info = info
        self._history: TokenHistory | None = None
        self.logit_strategies = self._logit_strategies()
        # Places in the batch of rows that draw, and of those the places of rows with filters.
        rows = [info.rows[i] for i in info.random_rows]
        self._temperature = TemperatureStrategy(rows, info.device) if rows else None
        self._filtered = [i for i, row in enumerate(rows) if _has_filter(row, info.vocab_size)]
        self._open = [i for i, row in enumerate(rows) if not _has_filter(row, info.vocab_size)]
        self._filtered_rows = [rows[i] for i in self._filtered]
        self.filter_strategies = build_filters(self._filtered_rows, info.vocab_size, info.device)

    def _logit_strategies(self) -> list[LogitStrategy]:
        info = self._info
        strategies: list[LogitStrategy] = []
        penalised = [
            (i, row)
            for i, row in enumerate(info.rows)
            if row.params.repetition_penalty != 1.0
            or row.params.frequency_penalty != 0.0
            or row.params.presence_penalty != 0.0
        ]
        if penalised:
            self._history = TokenHistory(penalised, info.vocab_size, info.device)
            if info.has_repetition:
                strategies.append(RepetitionPenaltyStrategy(penalised, self._history, info.device))
            if info.has_freq:
                strategies.append(FrequencyPenaltyStrategy(penalised, self._history, info.device))
            if info.has_presence:
                strategies.append(PresencePenaltyStrategy(penalised, self._history, info.device))
        if info.has_bias:
            biased = [(i, row) for i, row in enumerate(info.rows) if row.params.logit_bias]
            strategies.append(LogitBiasStrategy(biased, info.device))
        if info.has_allowed:
            limited = [
                (i, row)
                for i, row in enumerate(info.rows)
                if row.params.allowed_token_ids is not None
            ]
            strategies.append(AllowedTokenIdsStrategy(limited, info.vocab_size, info.device))
        if info.has_bad_words:
            worded = [(i, row) for i, row in enumerate(info.rows) if row.bad_ids]
            strategies.append(BadWordsStrategy(worded, info.device))
        if info.has_min_tokens:
            waiting = [
                (i, row)
                for i, row in enumerate(info.rows)
                if row.stop_ids and len(row.output_ids) < row.params.min_tokens
            ]
            strategies.append(MinTokensStrategy(waiting, info.device))
        matched = [(i, row) for i, row in enumerate(info.rows) if row.matcher is not None]
        if matched:
            strategies.append(StructuredOutputStrategy(matched, info.vocab_size, info.device))
        return strategies

    def record(self, tokens: torch.Tensor) -> None:
        """Take note of each row's new token, [batch] int64."""
        if self._history is not None:
            self._history.append(tokens)

    def draw(self, logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """One id for each random row: `logits` [R, V] fp32, row maxima [R, 1]; [R] int64."""
        assert self._temperature is not None  # only called for batches with random rows
        values = self._temperature.scale(logits, largest)
        uniform = self._info.row_uniforms()
        if not self._filtered:
            return draw_from_vocabulary(values, uniform)
        if not self._open:
            return self._draw_filtered(values, uniform)
        tokens = torch.empty(len(values), dtype=torch.int64, device=values.device)
        tokens[self._open] = draw_from_vocabulary(values[self._open], uniform[self._open])
        tokens[self._filtered] = self._draw_filtered(
            values[self._filtered], uniform[self._filtered]
        )
        return tokens

    def _draw_filtered(self, values: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        rows, vocab_size = self._filtered_rows, self._info.vocab_size
        # The mass of a whole row matters only to a nucleus over the whole row.
        has_top_k = [_has_top_k(row, vocab_size) for row in rows]
        needs_total = any(
            row.params.top_p < 1.0 and not limited
            for row, limited in zip(rows, has_top_k, strict=True)
        )
        if self._info.device.type == "cpu" and not any(has_top_k):
            total = row_mass(values) if needs_total else None
            table = CandidateTable.build_above(values, self._floors(total), total)
            for strategy in self.filter_strategies:
                strategy.apply(table)
            return table.draw(uniform)
        width = max(
            row.params.top_k + 1 if limited else _NUCLEUS_WIDTH
            for row, limited in zip(rows, has_top_k, strict=True)
        )
        return self._draw_growing(values, uniform, width, needs_total)

    def _floors(self, total: torch.Tensor | None) -> torch.Tensor:
        """[rows, 1] fp32: values that min-p drops, or that a nucleus cannot need.

        All tokens less likely than (1 - top_p) / V may be left out at once: what remains still
        holds top_p of the mass.
        """
        params = [row.params for row in self._filtered_rows]
        floors = torch.tensor([[math.log(p.min_p) if p.min_p else -math.inf] for p in params])
        if total is not None:
            shares = torch.tensor([[1.0 - p.top_p] for p in params], dtype=torch.float64)
            needed = (shares * total / self._info.vocab_size).log().float()
            floors = torch.maximum(floors, needed)
        return floors - _FLOOR_MARGIN

    def _draw_growing(
        self, values: torch.Tensor, uniform: torch.Tensor, width: int, needs_total: bool
    ) -> torch.Tensor:
        """Draw from tables of `width` candidates; rows that need more get wider ones."""
        rows, filters = self._filtered_rows, self.filter_strategies
        places = torch.arange(len(rows), device=values.device)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=values.device)
        while True:
            table = CandidateTable.build(values, width, needs_total)
            for strategy in filters:
                strategy.apply(table)
            drawn, is_complete = table.draw(uniform), table.is_complete()
            if bool(is_complete.all()):
                tokens[places] = drawn
                return tokens
            tokens[places[is_complete]] = drawn[is_complete]
            remaining = (~is_complete).nonzero()[:, 0]
            values, uniform, places = values[remaining], uniform[remaining], places[remaining]
            rows = [rows[i] for i in remaining.tolist()]
            filters = build_filters(rows, self._info.vocab_size, values.device)
            width *= _WIDTH_GROWTH


def build_filters(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device
) -> list[FilterStrategy]:
    """The filters that any of `rows` uses, in order: top-k, top-p, min-p."""
    filters: list[FilterStrategy] = []
    if any(_has_top_k(row, vocab_size) for row in rows):
        filters.append(TopKStrategy(rows, vocab_size, device))
    if any(row.params.top_p < 1.0 for row in rows):
        filters.append(TopPStrategy(rows, device))
    if any(row.params.min_p > 0.0 for row in rows):
        filters.append(MinPStrategy(rows, device))
    return filters


def _has_top_k(row: SamplingRow, vocab_size: int) -> bool:
    return 0 < row.params.top_k < vocab_size


def _has_filter(row: SamplingRow, vocab_size: int) -> bool:
    return _has_top_k(row, vocab_size) or row.params.top_p < 1.0 or row.params.min_p > 0.0
