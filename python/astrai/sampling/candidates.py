"""The likeliest tokens of each row, and drawing one token by inverse CDF."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_BLOCK = 256


@dataclass
class CandidateTable:
    """Tokens of each row, likeliest first and lowest id first among equals.

    values  [R, W] fp32, logit minus the row's largest logit, divided by the temperature
    weights [R, W] float64, exp(values): probabilities up to a factor
    ids     [R, W] int64
    total   [R, 1] float64, weight of all tokens that the filters so far have let through
    kept    [R] int64, how many leading columns the filters have let through
    is_exhaustive  True when no token outside the table could be kept
    """

    values: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    total: torch.Tensor
    kept: torch.Tensor
    is_exhaustive: bool

    @classmethod
    def build(cls, values: torch.Tensor, width: int, needs_total: bool = True) -> CandidateTable:
        """Take the `width` likeliest of `values` [R, V]; V or more takes all of them.

        Without `needs_total` the total is that of the table, which costs no pass over V.
        """
        num_rows, vocab_size = values.shape
        total = row_mass(values) if needs_total else None
        covers = width >= vocab_size
        if covers:
            top, ids = torch.sort(values, dim=1, descending=True, stable=True)
        else:
            # topk leaves the order of equal values open: put them by id, then sort stably.
            _, ids = torch.topk(values, width, dim=1, sorted=False)
            ids, _ = torch.sort(ids, dim=1)
            top, order = torch.sort(values.gather(1, ids), dim=1, descending=True, stable=True)
            ids = ids.gather(1, order)
        kept = torch.full((num_rows,), top.shape[1], dtype=torch.int64, device=values.device)
        weights = top.double().exp()
        if total is None:
            total = weights.sum(dim=1, keepdim=True)
        return cls(top, weights, ids, total, kept, covers)

    @classmethod
    def build_above(
        cls, values: torch.Tensor, floors: torch.Tensor, total: torch.Tensor | None
    ) -> CandidateTable:
        """Take every token of `values` [R, V] at or above its row's floor. CPU only.

        floors  [R, 1] fp32, such that no filter of the row keeps a token below
        total   [R, 1] float64, mass of the whole rows; None takes that of the table
        Comparing all values is much cheaper than selecting the largest.
        """
        num_rows, vocab_size = values.shape
        flat_values = values.numpy().ravel()
        flat = np.flatnonzero(values.numpy() >= floors.numpy())
        rows, ids = np.divmod(flat, vocab_size)
        counts = np.bincount(rows, minlength=num_rows)
        columns = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.full((num_rows, counts.max()), -np.inf, dtype=np.float32)
        table[rows, columns] = flat_values[flat]
        table_ids = np.zeros(table.shape, dtype=np.int64)
        table_ids[rows, columns] = ids
        top, order = torch.sort(torch.from_numpy(table), dim=1, descending=True, stable=True)
        weights = top.double().exp()
        if total is None:
            total = weights.sum(dim=1, keepdim=True)
        ids_in_order = torch.from_numpy(table_ids).gather(1, order)
        return cls(top, weights, ids_in_order, total, torch.from_numpy(counts), True)

    def cut(self, counts: torch.Tensor) -> None:
        """Keep at most the first `counts` [R] columns of each row, and at least one."""
        self.kept = torch.minimum(self.kept, counts.clamp(min=1))

    def is_complete(self) -> torch.Tensor:
        """[R] bool: rows whose kept tokens are certain, whatever lies outside the table.

        A row is uncertain when its last kept value reaches to the end of the table: more tokens
        of the same value, or more that the filters would keep, may lie outside.
        """
        if self.is_exhaustive:
            return torch.ones_like(self.kept, dtype=torch.bool)
        last_kept = self.values.gather(1, self.kept[:, None] - 1)[:, 0]
        # Where a table ends with ids that were ruled out, only such ids lie outside it.
        return (last_kept > self.values[:, -1]) | (self.values[:, -1] == -torch.inf)

    def draw(self, uniform: torch.Tensor) -> torch.Tensor:
        """One kept id of each row, [R] int64, for `uniform` [R] float64 in [0, 1)."""
        columns = torch.arange(self.weights.shape[1], device=self.weights.device)
        weights = self.weights * (columns < self.kept[:, None])
        return self.ids.gather(1, _invert_cdf(weights, uniform)[:, None])[:, 0]


def draw_from_vocabulary(values: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One id of each row of `values` [R, V] (log weights, largest 0), by inverse CDF in id order.

    Two levels, blocks of 256 ids and then ids of one block, so that no [R, V] table of float64
    running sums is needed. Returns [R] int64; `uniform` is [R] float64 in [0, 1).
    """
    blocks = _blocks(values.exp())
    sums = blocks.sum(dim=2).double()
    block = _invert_cdf(sums, uniform)
    rows = torch.arange(len(values), device=values.device)
    # What is left of the random number inside the chosen block is uniform again.
    before = sums.cumsum(dim=1).gather(1, block[:, None])[:, 0]
    chosen_sum = sums.gather(1, block[:, None])[:, 0]
    inner = (uniform * sums.sum(dim=1) - (before - chosen_sum)) / chosen_sum
    column = _invert_cdf(blocks[rows, block].double(), inner.clamp(0.0, 1.0))
    return block * _BLOCK + column


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """`weights` [R, V] as [R, blocks, 256], padded with zeros."""
    padding = -weights.shape[1] % _BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    return weights.view(len(weights), -1, _BLOCK)


def row_mass(values: torch.Tensor) -> torch.Tensor:
    """Sum of exp(values) of each row [R, V]: [R, 1] float64.

    It is taken over blocks of 256 first: a sum over a short piece rounds in the same way however
    many rows there are, where a sum over a whole row is split between threads if it is alone.
    """
    return _blocks(values.exp()).sum(dim=2).double().sum(dim=1, keepdim=True)


def _invert_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First column where the running sum of `weights` [R, W] passes uniform * total: [R] int64.

    A column of weight 0 is never chosen: its running sum does not pass what its predecessor's
    did not, and the target is held below the total.
    """
    running = weights.cumsum(dim=1)
    total = running[:, -1:]
    target = torch.minimum(
        uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(running, target, right=True)[:, 0]
