"""Log probabilities of a prompt's own tokens, gathered while its chunks are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from astrai.engine.request import Request
from astrai.engine.scheduler import ScheduledBatch
from astrai.sampling.logprobs import token_logprobs
from astrai.threads import single_torch_thread


class PromptScores:
    """Takes the logits of a batch's `prompt_rows` in order and hands them to their requests.

    unusable  (request, tokens before the place) of prompts with logits that are not finite
    """

    def __init__(self, batch: ScheduledBatch, vocab_size: int) -> None:
        self.unusable: list[tuple[Request, int]] = []
        self._vocab_size = vocab_size
        self._positions = self._walk(batch)

    @staticmethod
    def _walk(batch: ScheduledBatch) -> Iterator[tuple[Request, int]]:
        for place, first, count in batch.scored:
            request = batch.sequences[place].request
            for position in range(first, first + count):
                yield request, position

    def read(self, logits: torch.Tensor) -> None:
        """Take the next rows: `logits` [rows, at least vocab_size] fp32, raw."""
        rows = [next(self._positions) for _ in range(len(logits))]
        tokens = [request.prompt_ids[position + 1] for request, position in rows]
        counts = [request.params.prompt_logprobs or 0 for request, _ in rows]
        with single_torch_thread():
            entries = token_logprobs(logits[:, : self._vocab_size], tokens, counts)
        for (request, position), token, entry in zip(rows, tokens, entries, strict=True):
            if math.isnan(entry[token]):
                if all(request is not other for other, _ in self.unusable):
                    self.unusable.append((request, position + 1))
            else:
                request.note_prompt_logprobs(position, [entry])
