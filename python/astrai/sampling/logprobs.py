"""Log probabilities of chosen tokens, under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Natural log probabilities at one output position by token id: the chosen token first, then the
# likeliest tokens, likeliest first.
TokenLogprobs = dict[int, float]


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
        most = max(self._counts)
        values, ids = torch.topk(self._logprobs, most, dim=1)
        top_values, top_ids = values.tolist(), ids.tolist()
        chosen_ids = torch.tensor([[max(tokens[row], 0)] for row in self._rows])
        chosen = self._logprobs.gather(1, chosen_ids.to(self._logprobs.device))[:, 0].tolist()
        collected: dict[int, TokenLogprobs] = {}
        for i, (row, count) in enumerate(zip(self._rows, self._counts, strict=True)):
            if tokens[row] >= 0:
                likeliest = zip(top_ids[i][:count], top_values[i][:count], strict=True)
                collected[row] = {tokens[row]: chosen[i], **dict(likeliest)}
        return collected
