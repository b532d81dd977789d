"""The step loop: schedule, run, sample, account."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from astrai.engine.detokenizer import PieceSource
from astrai.engine.request import Request
from astrai.engine.scheduler import ScheduledBatch, Scheduler
from astrai.sampling.batch_info import SamplingBatchInfo
from astrai.sampling.sampler import Sampler
from astrai.threads import single_torch_thread


class BatchExecutor(Protocol):
    """The part of `Executor` that the step loop needs."""

    def execute_prefill(self, batch: ScheduledBatch) -> torch.Tensor | None: ...
    def execute_decode(self, batch: ScheduledBatch) -> torch.Tensor: ...


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine at one moment."""

    waiting: int
    running: int
    num_pages: int
    free_pages: int
    preemptions: int
    steps: int


class EngineCore:
    """Requests in, tokens out, one `step` at a time.

    Whoever drives it calls `step` while there is work; results collect in the requests. All
    methods may be called from several threads: one runs at a time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: BatchExecutor,
        sampler: Sampler,
        tokenizer: PieceSource,
        special_ids: Collection[int],
    ) -> None:
        self.scheduler = scheduler
        self._executor: BatchExecutor | None = executor
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._special_ids = frozenset(special_ids)
        self._prefill_info: SamplingBatchInfo | None = None
        self._decode_info: SamplingBatchInfo | None = None
        self._next_task_id = 0
        self._num_steps = 0
        # Reentrant, so that code called from within a step may abort a request.
        self._lock = threading.RLock()

    @property
    def has_work(self) -> bool:
        """True while some request is unfinished."""
        return self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a checked request. One that may generate nothing ends at once."""
        with self._lock:
            sequences = request.make_sequences(
                self._next_task_id, self._tokenizer, self._special_ids
            )
            self._next_task_id += len(sequences)
            if request.max_new_tokens == 0:
                for sequence in sequences:
                    sequence.end("length")
            elif sequences[0].is_grammar_over():  # only the empty output fits
                for sequence in sequences:
                    sequence.end("stop")
            else:
                self.scheduler.add(request)

    def abort(self, request_id: int) -> bool:
        """End a request now; False if it is unknown or finished. Its pages are returned."""
        with self._lock:
            return self.scheduler.abort(request_id)

    def abort_all(self) -> None:
        """End every request."""
        with self._lock:
            for request_id in self.scheduler.request_ids():
                self.scheduler.abort(request_id)

    def release_executor(self) -> None:
        """Let go of the model and the cache's storage. No step can run afterwards."""
        with self._lock:
            self._executor = None

    def step(self) -> None:
        """Run one step of decoding and one chunk of prefill, as far as there is work for them.

        If the model or the sampler fails, the exception passes through and every request is left
        as it was before the step.
        """
        with self._lock:
            try:
                self._step()
            except BaseException:
                self._prefill_info = self._decode_info = None
                self.scheduler.rollback()
                raise
            self._num_steps += 1

    def _step(self) -> None:
        # Decoding first: a prompt that is complete then shows its first token without delay, and
        # pages are known to suffice for running sequences before a new one is let in.
        executor = self._executor
        if executor is None:
            raise RuntimeError("step: the engine was closed; expected an open one")
        batch = self.scheduler.schedule_decode()
        if batch is not None:
            logits = executor.execute_decode(batch)
            self._decode_info = self._finish_batch(batch, logits, self._decode_info)
        batch = self.scheduler.schedule_prefill()
        if batch is not None:
            chunk_logits = executor.execute_prefill(batch)
            self._prefill_info = self._finish_batch(batch, chunk_logits, self._prefill_info)

    def _finish_batch(
        self,
        batch: ScheduledBatch,
        logits: torch.Tensor | None,
        previous: SamplingBatchInfo | None,
    ) -> SamplingBatchInfo | None:
        if logits is None:
            self.scheduler.commit(batch)
            return previous
        sequences = [batch.sequences[place] for place in batch.sampled]
        rows = [sequence.row for sequence in sequences]
        with torch.inference_mode(), single_torch_thread():
            info = self._sampler.batch_info(rows, logits.device, previous)
            sampled = self._sampler.sample(logits, info)
        self.scheduler.commit(batch)
        now = time.perf_counter()
        for place, (sequence, token_id) in enumerate(
            zip(sequences, sampled.token_ids, strict=True)
        ):
            if sequence.finish_reason is not None:
                continue  # aborted while the step ran
            if token_id < 0:
                self.scheduler.finish(sequence, "error")
                continue
            if sequence.accept(token_id, sampled.logprobs.get(place), now):
                self.scheduler.finish(sequence)
            else:
                self.scheduler.place(sequence)
        return info

    def stats(self) -> EngineStats:
        """Counters now."""
        with self._lock:
            pool = self.scheduler.pool
            return EngineStats(
                waiting=self.scheduler.num_waiting,
                running=self.scheduler.num_running,
                num_pages=pool.num_pages,
                free_pages=pool.num_free_pages,
                preemptions=self.scheduler.num_preemptions,
                steps=self._num_steps,
            )
