"""Token embedding and the output head that may share its matrix."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from astrai.models.layers.linear import Linear


class Embedding(nn.Module):
    """Rows of a matrix [vocab_size, hidden_size] by token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)


def tie_head(head: Linear, embedding: Embedding) -> None:
    """Make the head's matrix the embedding's: one parameter, one storage."""
    head.weight.values = embedding.weight
