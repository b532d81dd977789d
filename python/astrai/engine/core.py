"""The step loop: schedule, run, sample, account."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from astrai.engine.detokenizer import PieceSource
from astrai.engine.prompt_scores import PromptScores
from astrai.engine.request import Request, Sequence
from astrai.engine.scheduler import ScheduledBatch, Scheduler
from astrai.sampling.batch_info import SamplingBatchInfo
from astrai.sampling.sampler import RULED_OUT, Sampler
from astrai.threads import single_torch_thread

_logger = logging.getLogger("astrai.engine")


class BatchExecutor(Protocol):
    """The part of `Executor` that the step loop needs."""

    def execute_prefill(
        self,
        batch: ScheduledBatch,
        read_prompt_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None: ...
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

    Whoever drives it calls `step`, or `advance`, while there is work; results collect in the
    requests. All methods may be called from several threads: one runs at a time.

    progressed       requests to which the last `step` gave tokens or an end
    failed_requests  requests of the batch in which the last `step` failed; empty if it did not,
                     or if it failed outside a batch
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
        self.progressed: list[Request] = []
        self.failed_requests: list[Request] = []
        self._in_step: list[Sequence] = []  # whose tokens are being computed or given out
        # Reentrant, so that code called from within a step may abort a request.
        self._lock = threading.RLock()

    @property
    def has_work(self) -> bool:
        """True while some request is unfinished."""
        return self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a checked request. One that has nothing to compute ends at once."""
        with self._lock:
            sequences = request.make_sequences(
                self._next_task_id, self._tokenizer, self._special_ids
            )
            self._next_task_id += len(sequences)
            if sequences[0].is_grammar_over():  # only the empty output fits
                request.max_new_tokens = 0
            if request.max_new_tokens == 0 and request.num_scored == len(request.prompt_ids) - 1:
                for sequence in sequences:
                    sequence.end(sequence.empty_reason())
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

    def step(self, only: Request | None = None) -> None:
        """Run one step of decoding and one chunk of prefill, as far as there is work for them.

        only  run what has been begun of this request and leave the others as they are

        If the model or the sampler fails, the exception passes through and every request is left
        as it was before the failing batch.
        """
        with self._lock:
            self.progressed, self.failed_requests, self._in_step = [], [], []
            try:
                self._step(only)
            except BaseException:
                self._prefill_info = self._decode_info = None
                self.scheduler.rollback()
                self.failed_requests = _distinct_requests(self._in_step)
                raise
            self._num_steps += 1

    def advance(self) -> list[Request]:
        """A step that a failing request does not stop: the requests that got tokens or an end.

        If a batch fails, each of its requests runs again alone, which gives the same tokens. One
        that fails alone ends with finish_reason "error", the exception in `Request.error`; the
        others go on. An exception passes through only if there is no batch to blame, such as one
        of the scheduler: the engine cannot go on then.
        """
        with self._lock:
            try:
                self.step()
                progressed = self.progressed
            except Exception as error:
                if not self.failed_requests:
                    raise
                progressed = self.progressed + self._isolate(error, self.failed_requests)
            # Not kept: the exception of a failed request holds all tensors of its step.
            self.progressed, self.failed_requests, self._in_step = [], [], []
            return list(dict.fromkeys(progressed))

    def _isolate(self, error: Exception, suspects: list[Request]) -> list[Request]:
        """Fail those of `suspects` that cannot be computed alone: the requests that got on."""
        if len(suspects) == 1:
            self._fail(suspects[0], error)
            return suspects
        progressed: list[Request] = []
        for request in suspects:
            try:
                self.step(only=request)
            except Exception as own_error:
                if self.failed_requests != [request]:
                    raise
                self._fail(request, own_error)
                progressed.append(request)
            progressed += self.progressed
        return progressed

    def _fail(self, request: Request, error: Exception) -> None:
        _logger.error(
            "request %d of %d tokens could not be computed",
            request.request_id,
            len(request.prompt_ids) + request.num_output_tokens,
            exc_info=error,
        )
        request.error = error
        self.scheduler.end_all(request, "error")

    def _step(self, only: Request | None) -> None:
        # Decoding first: a prompt that is complete then shows its first token without delay, and
        # pages are known to suffice for running sequences before a new one is let in.
        executor = self._executor
        if executor is None:
            raise RuntimeError("step: the engine was closed; expected an open one")
        batch = self.scheduler.schedule_decode(only)
        if batch is not None:
            self._in_step = batch.sequences
            logits = executor.execute_decode(batch)
            self._decode_info = self._finish_batch(batch, logits, self._decode_info)
            self._in_step = []
        batch = self.scheduler.schedule_prefill(only)
        if batch is not None:
            self._in_step = batch.sequences
            if batch.scored:
                scores = PromptScores(batch, self._sampler.vocab_size)
                chunk_logits = executor.execute_prefill(batch, scores.read)
                self._end_unusable(scores)
            else:
                chunk_logits = executor.execute_prefill(batch)
            self._prefill_info = self._finish_batch(batch, chunk_logits, self._prefill_info)

    def _end_unusable(self, scores: PromptScores) -> None:
        """End the requests whose prompts gave logits that mean nothing."""
        for request, num_tokens in scores.unusable:
            for sequence in request.sequences:
                sequence.error = _not_finite(num_tokens)
            self.scheduler.end_all(request, "error")

    def _finish_batch(
        self,
        batch: ScheduledBatch,
        logits: torch.Tensor | None,
        previous: SamplingBatchInfo | None,
    ) -> SamplingBatchInfo | None:
        if logits is None:
            self._commit(batch)
            return previous
        sequences = [batch.sequences[place] for place in batch.sampled]
        rows = [sequence.row for sequence in sequences]
        with torch.inference_mode(), single_torch_thread():
            info = self._sampler.batch_info(rows, logits.device, previous)
            sampled = self._sampler.sample(logits, info)
        self._commit(batch)
        now = time.perf_counter()
        self._note_progress(sequences)
        for place, (sequence, token_id) in enumerate(
            zip(sequences, sampled.token_ids, strict=True)
        ):
            if sequence.finish_reason is not None:
                continue  # aborted while the step ran
            if token_id < 0:
                sequence.error = _failure(sequence, token_id)
                self.scheduler.finish(sequence, "error")
                continue
            try:
                is_last = sequence.accept(token_id, sampled.logprobs.get(place), now)
            except Exception as error:
                # Its token is counted and its text is not, so it cannot go on. Others can.
                self._fail(sequence.request, error)
                continue
            if is_last:
                self.scheduler.finish(sequence)
            else:
                self.scheduler.place(sequence)
        return info

    def _commit(self, batch: ScheduledBatch) -> None:
        self.scheduler.commit(batch)
        # Aborted meanwhile, or ended without a token.
        self._note_progress(s for s in batch.sequences if s.finish_reason is not None)

    def _note_progress(self, sequences: Iterable[Sequence]) -> None:
        self.progressed = list(dict.fromkeys(self.progressed + _distinct_requests(sequences)))

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


def _distinct_requests(sequences: Iterable[Sequence]) -> list[Request]:
    return list(dict.fromkeys(sequence.request for sequence in sequences))


def _failure(sequence: Sequence, code: int) -> str:
    """Why no token could be chosen for a sequence; `code` is the sampler's."""
    num_tokens = sequence.num_tokens
    matcher = sequence.matcher
    if matcher is not None and matcher.error is not None:
        return (
            f"the structured output cannot go on after {num_tokens} tokens: {matcher.error}; "
            "expected a simpler grammar"
        )
    if code == RULED_OUT:
        return (
            f"the sampling parameters rule out every token after {num_tokens} tokens "
            "(allowed_token_ids, bad_words, min_tokens, structured); "
            "expected at least one that may be chosen"
        )
    return _not_finite(num_tokens)


def _not_finite(num_tokens: int) -> str:
    return (
        f"the model's logits are not finite after {num_tokens} tokens; "
        "expected at least one finite logit"
    )
