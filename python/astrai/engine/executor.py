"""Runs the model over a scheduled batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from astrai.attention import attn_backend

if TYPE_CHECKING:
    from astrai.attention import ATTN_BACKEND
    from astrai.engine.scheduler import ScheduledBatch
    from astrai.kv_cache import KVCache
    from astrai.models.base import CausalLM

# Rows of a prompt whose logits exist at one time: 150 MB for a vocabulary of 152,000 in float32,
# while the matrix product is as fast per row as with many more.
PROMPT_LOGIT_ROWS = 256


class Executor:
    """Binds a batch to the cache, runs the model and returns logits of the rows that need them.

    Keys and values of every row are written to the cache; counting them is the scheduler's part
    (`Scheduler.commit`), so a pass that fails can simply be run again.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: KVCache,
        device: torch.device,
        backend: ATTN_BACKEND | str | None = None,
    ) -> None:
        """`backend` is an explicit choice of attention backend; None chooses automatically."""
        self._model = model
        self._kv = kv
        self._device = device
        self._backend = backend

    def execute_prefill(
        self,
        batch: ScheduledBatch,
        read_prompt_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Compute chunks of prompts.

        read_prompt_logits  takes the float32 logits [rows, vocabulary rows] of batch.prompt_rows,
                            in their order, in pieces of at most PROMPT_LOGIT_ROWS rows
        Returns float32 logits [rows that reach their last known token, vocabulary rows] in the
        order of batch.sampled; None if every chunk ends inside its prompt.
        """
        with torch.inference_mode(), self._chosen_backend():
            hidden = self._forward(batch)
            if read_prompt_logits is not None:
                rows = batch.prompt_rows
                for start in range(0, len(rows), PROMPT_LOGIT_ROWS):
                    piece = torch.tensor(
                        rows[start : start + PROMPT_LOGIT_ROWS], device=self._device
                    )
                    read_prompt_logits(self._model.compute_logits(hidden[piece]))
            if not batch.sampled:
                return None
            last_rows = self._kv.step.last_rows
            if len(batch.sampled) < len(batch.sequences):
                last_rows = last_rows[batch.sampled]
            return self._model.compute_logits(hidden[last_rows])

    def execute_decode(self, batch: ScheduledBatch) -> torch.Tensor:
        """Compute one new token of every row: float32 logits [rows, vocabulary rows]."""
        with torch.inference_mode(), self._chosen_backend():
            return self._model.compute_logits(self._forward(batch))

    def _forward(self, batch: ScheduledBatch) -> torch.Tensor:
        self._kv.bind(batch.task_ids, batch.q_lens)
        input_ids = torch.tensor(batch.input_ids, dtype=torch.int64, device=self._device)
        hidden: torch.Tensor = self._model(input_ids, self._kv.step.positions, self._kv)
        return hidden

    def _chosen_backend(self) -> AbstractContextManager[object]:
        return nullcontext() if self._backend is None else attn_backend(self._backend)
