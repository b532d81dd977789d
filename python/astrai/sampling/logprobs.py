"""Log probabilities of chosen tokens, under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Natural log probabilities at one output position by token id: the chosen token first, then the
# likeliest tokens, likeliest first.
TokenLogprobs = dict[int, float]

# Few enough rows for their probabilities to be still in the cache when the likeliest are looked
# for: four times as fast as 256 rows at once.
_CPU_BLOCK_ROWS = 8


class RawLogprobs:
    """Holds the raw distribution of the rows that asked, until their tokens are known.

    The distribution is that of the raw logits over the tokenizer's vocabulary: no penalty, bias,
    temperature or filter has touched it.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[int], counts: Sequence[int]) -> None:
        """`logits` [batch, V] fp32 before any strategy; `counts` likeliest tokens per row."""
        self._rows = list(rows)
        self._counts = [min(count, logits.shape[1]) for count in counts]
        self._logprobs = logits[self._rows].log_softmax(dim=1)

    def collect(self, tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Row -> logprobs, given the tokens of the whole batch; a token below 0 has none."""
        chosen = [tokens[row] for row in self._rows]
        entries = _entries(self._logprobs, [max(token, 0) for token in chosen], self._counts)
        return {
            row: entry
            for row, token, entry in zip(self._rows, chosen, entries, strict=True)
            if token >= 0
        }


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Logprobs of `tokens`, one for each row of the raw `logits` [R, V] fp32.

    `counts` likeliest tokens per row. A row without a finite maximum gives NaN for its token.
    """
    counts = [min(count, logits.shape[1]) for count in counts]
    block = _CPU_BLOCK_ROWS if logits.device.type == "cpu" else len(logits)
    entries: list[TokenLogprobs] = []
    for start in range(0, len(logits), block):
        end = start + block
        logprobs = logits[start:end].log_softmax(dim=1)
        entries += _entries(logprobs, tokens[start:end], counts[start:end])
    return entries


def _entries(
    logprobs: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    values, ids = torch.topk(logprobs, max(counts), dim=1)
    top_values, top_ids = values.tolist(), ids.tolist()
    token_ids = torch.tensor([[token] for token in tokens], device=logprobs.device)
    own = logprobs.gather(1, token_ids)[:, 0].tolist()
    return [
        {token: own[i], **dict(zip(top_ids[i][:count], top_values[i][:count], strict=True))}
        for i, (token, count) in enumerate(zip(tokens, counts, strict=True))
    ]
