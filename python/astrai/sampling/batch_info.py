"""What the sampler knows about a batch, worked out when the batch changes and not at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from astrai.sampling.params import SamplingParams
from astrai.sampling.pipeline import SamplingPipeline
from astrai.sampling.random import uniforms

if TYPE_CHECKING:
    from astrai.sampling.structured import TokenMatcher


@dataclass(eq=False)
class SamplingRow:
    """One sample being generated, as the sampler sees it.

    prompt_ids, output_ids   token ids; output_ids is the live list that the engine appends to
    stream_key               key of the row's random stream (`random.stream_key`)
    stop_ids                 ids that must not be chosen before params.min_tokens tokens are out
    bad_ids                  the bad words as token ids (`engine.bans.bad_word_ids`)
    matcher                  the grammar that the output follows, or None
    """

    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    stream_key: int
    stop_ids: tuple[int, ...] = ()
    bad_ids: tuple[tuple[int, ...], ...] = ()
    matcher: TokenMatcher | None = None

    @property
    def has_bans(self) -> bool:
        """True when some parameter makes tokens impossible, so that none might be left."""
        params = self.params
        return bool(
            params.allowed_token_ids is not None
            or self.bad_ids
            or self.matcher is not None
            or (self.stop_ids and params.min_tokens)
        )


class SamplingBatchInfo:
    """Host facts and device tensors of one batch of rows; valid until the batch changes.

    The `has_*` flags are plain Python booleans, so choosing a path never waits for a device.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> None:
        self.rows = list(rows)
        self.vocab_size = vocab_size
        self.device = device
        params = [row.params for row in self.rows]
        self.has_repetition = any(p.repetition_penalty != 1.0 for p in params)
        self.has_freq = any(p.frequency_penalty != 0.0 for p in params)
        self.has_presence = any(p.presence_penalty != 0.0 for p in params)
        self.has_bias = any(p.logit_bias for p in params)
        self.has_allowed = any(p.allowed_token_ids is not None for p in params)
        self.has_bad_words = any(row.bad_ids for row in self.rows)
        self.has_min_tokens = any(
            len(row.output_ids) < row.params.min_tokens and row.stop_ids for row in self.rows
        )
        self.greedy_rows = [i for i, p in enumerate(params) if p.is_greedy]
        self.random_rows = [i for i, p in enumerate(params) if not p.is_greedy]
        self.logprob_rows = [i for i, p in enumerate(params) if p.needs_logprobs]
        self._stream_keys = np.array(
            [self.rows[i].stream_key for i in self.random_rows], dtype=np.uint64
        )
        self._num_outputs = [len(row.output_ids) for row in self.rows]
        self._is_stale = False
        self.pipeline = SamplingPipeline(self)

    @property
    def all_greedy(self) -> bool:
        """True when no row draws a random number."""
        return not self.random_rows

    def matches(self, rows: Sequence[SamplingRow]) -> bool:
        """True when `rows` are this batch's rows and every token since then went through it."""
        return (
            not self._is_stale
            and len(rows) == len(self.rows)
            and all(a is b for a, b in zip(rows, self.rows, strict=True))
            and self._num_outputs == [len(row.output_ids) for row in rows]
        )

    def row_uniforms(self) -> torch.Tensor:
        """The random number of each random row at its current output position: [rows] float64."""
        positions = np.array([self._num_outputs[i] for i in self.random_rows], dtype=np.uint64)
        return torch.from_numpy(uniforms(self._stream_keys, positions)).to(self.device)

    def advance(self, tokens: torch.Tensor) -> None:
        """Record that each row got its token ([rows] int64 on the device of the batch)."""
        self._num_outputs = [count + 1 for count in self._num_outputs]
        self.pipeline.record(tokens)

    def invalidate(self) -> None:
        """Refuse to serve another step: a row got no token, so the counts no longer hold."""
        self._is_stale = True
