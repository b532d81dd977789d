"""From logits to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from astrai.sampling.batch_info import SamplingBatchInfo, SamplingRow
from astrai.sampling.logprobs import RawLogprobs, TokenLogprobs

# In place of a token id: the row's logits have no finite maximum (NaN or infinity), or they had one
# until the row's parameters ruled out every token.
NOT_FINITE = -1
RULED_OUT = -2


@dataclass(frozen=True)
class SampledTokens:
    """What one step chose.

    token_ids  one id for each row; NOT_FINITE or RULED_OUT where none could be chosen
    logprobs   row -> TokenLogprobs, for rows that asked
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Chooses a token for each row of a batch.

    vocab_size is the tokenizer's: ids at or beyond it (rows that pad the output layer) are never
    chosen. Everything is computed in fp32 or wider, and a row's token depends on its own logits,
    parameters, history and random stream only.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"Sampler: vocab_size is {vocab_size}; expected at least 1")
        self.vocab_size = vocab_size

    def batch_info(
        self,
        rows: Sequence[SamplingRow],
        device: torch.device,
        previous: SamplingBatchInfo | None = None,
    ) -> SamplingBatchInfo:
        """Facts about `rows`: `previous` again if the batch has not changed since, else new."""
        if previous is not None and previous.matches(rows):
            return previous
        return SamplingBatchInfo(rows, self.vocab_size, device)

    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo) -> SampledTokens:
        """Choose one token for each row.

        logits  [rows, at least vocab_size] any float dtype; fp32 input is changed in place
        """
        if logits.ndim != 2 or logits.shape[0] != len(info.rows):
            raise ValueError(
                f"sample: logits has shape {list(logits.shape)}; expected [{len(info.rows)}, V]"
            )
        if logits.shape[1] < self.vocab_size:
            raise ValueError(
                f"sample: logits has {logits.shape[1]} columns; "
                f"expected at least the vocabulary's {self.vocab_size}"
            )
        logits = logits[:, : self.vocab_size].float()
        raw = None
        if info.logprob_rows:
            counts = [info.rows[i].params.logprobs or 0 for i in info.logprob_rows]
            raw = RawLogprobs(logits, info.logprob_rows, counts)
        for strategy in info.pipeline.logit_strategies:
            strategy.apply(logits)
        tokens = self._choose(logits, info)
        token_ids: list[int] = tokens.tolist()
        if min(token_ids) < 0:
            info.invalidate()
            _tell_failures_apart(token_ids, logits, info)
        else:
            info.advance(tokens)
        return SampledTokens(token_ids, raw.collect(token_ids) if raw is not None else {})

    def _choose(self, logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
        if info.all_greedy:
            return _argmax(logits)
        if not info.greedy_rows:
            return _draw(logits, info)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        tokens[info.greedy_rows] = _argmax(logits[info.greedy_rows])
        tokens[info.random_rows] = _draw(logits[info.random_rows], info)
        return tokens


def _tell_failures_apart(
    token_ids: list[int], logits: torch.Tensor, info: SamplingBatchInfo
) -> None:
    """Mark the rows of `logits` (as the strategies left them) in which every token is ruled out."""
    for place, (token_id, row) in enumerate(zip(token_ids, info.rows, strict=True)):
        if token_id < 0 and row.has_bans and bool(logits[place].isneginf().all()):
            token_ids[place] = RULED_OUT


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Largest logit of each row, lowest id among equals; -1 if it is not finite."""
    if logits.device.type == "cpu":
        # NumPy's argmax is several times faster than torch's here; both return the first maximum
        # and treat NaN as the largest.
        ids = torch.from_numpy(np.argmax(logits.numpy(), axis=1))
    else:
        ids = logits.argmax(dim=1)
    largest = logits.gather(1, ids[:, None])[:, 0]
    return torch.where(largest.isfinite(), ids, -1)


def _draw(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """A random token of each row of `logits`, which are the batch's random rows."""
    largest = logits.amax(dim=1, keepdim=True)
    is_finite = largest.isfinite()
    # A row without a finite maximum gets harmless logits, so that its neighbours are unaffected.
    usable = torch.where(is_finite, logits, 0.0) if not bool(is_finite.all()) else logits
    tokens = info.pipeline.draw(usable, torch.where(is_finite, largest, 0.0))
    return torch.where(is_finite[:, 0], tokens, -1)
