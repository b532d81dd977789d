"""Keeping torch's threads out of the way of the compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Run torch's CPU operators on the calling thread alone.

    After a parallel operator torch's OpenMP workers spin for milliseconds in wait of the next one,
    on the very cores that the compiled kernels need: that made a decode step of a small model 1.4
    times as long. The setting belongs to the calling thread; a thread whose first torch operator
    runs meanwhile starts out with one thread too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
