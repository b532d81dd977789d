"""Which sequences run in the next step, and who owns the pages.

Continuous batching: sequences join and leave between steps. Prompts are computed in chunks under a
token budget, so a long prompt delays the decoding of others by one chunk at most. When pages run
out, the youngest running sequence gives up its pages and is computed again later (recompute
preemption, as in Kwon et al. 2023, "PagedAttention", arXiv:2309.06180).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from astrai.engine.outputs import FinishReason
from astrai.engine.request import Request, Sequence, SequenceState


class Pool(Protocol):
    """The part of `astrai.PagePool` that scheduling needs."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    def add_task(self, task_id: int) -> None: ...
    def match_prefix(self, tokens: list[int], salt: str = "") -> tuple[int, int]: ...
    def adopt_prefix(self, task_id: int, tokens: list[int], salt: str = "") -> int: ...
    def index_prefix(self, task_id: int, tokens: list[int], salt: str = "") -> None: ...
    def fork(self, parent: int, child: int) -> None: ...
    def try_reserve(self, task_id: int, num_new_tokens: int) -> bool: ...
    def append(self, task_id: int, num_new_tokens: int) -> None: ...
    def truncate(self, task_id: int, num_tokens: int) -> None: ...
    def free_task(self, task_id: int) -> None: ...
    def length(self, task_id: int) -> int: ...


@dataclass(frozen=True)
class ScheduledBatch:
    """One forward pass.

    sequences  the rows, oldest first
    q_lens     new tokens of each row
    input_ids  those tokens, row after row
    sampled    places of rows whose last known token is among them: they get a new token.
               A chunk that ends inside a prompt yields none.
    scored     (place, first token, tokens) of the chunks whose prompt asked for log probabilities:
               the tokens first .. first + tokens - 1 tell those of their successors
    """

    sequences: list[Sequence]
    q_lens: list[int]
    input_ids: list[int]
    sampled: list[int]
    scored: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def prompt_rows(self) -> list[int]:
        """Places in input_ids of the tokens that `scored` names, in its order."""
        starts = [0, *accumulate(self.q_lens)]
        rows: list[int] = []
        for place, first, count in self.scored:
            start = starts[place] + first - self.sequences[place].num_computed
            rows += range(start, start + count)
        return rows

    @property
    def task_ids(self) -> list[int]:
        """Names of the rows in the page pool."""
        return [sequence.task_id for sequence in self.sequences]


class Scheduler:
    """Keeps the queue, the running sequences and the ownership of pages.

    The life of a step: `schedule_prefill` or `schedule_decode`, the forward pass, then `commit` (or
    `rollback` if the pass failed), then `place` or `finish` for each sampled sequence. Between
    schedule and commit the batch is in flight: `abort` may be called, pages stay put until commit.

    Order is first come, first served and never changes: a preempted sequence goes back to its
    place. The oldest running sequence is never preempted for another, so some sequence always
    finishes and no request starves.

    With prefix_caching, whole pages of computed tokens stay findable until their memory is needed:
    a sequence that begins with the same tokens under the same salt starts behind them, be it
    another request, the next turn of a chat or the same sequence after a preemption.
    """

    def __init__(
        self, pool: Pool, *, max_batch: int, max_step_tokens: int, prefix_caching: bool = True
    ) -> None:
        self.pool = pool
        self.prefix_caching = prefix_caching
        self.max_batch = max_batch
        self.max_step_tokens = max_step_tokens
        self.num_preemptions = 0
        self._requests: dict[int, Request] = {}
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._in_flight: ScheduledBatch | None = None

    # --- requests ---------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while some sequence waits or runs."""
        return bool(self._waiting or self._prefilling or self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no pages yet, or no longer."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._prefilling) + len(self._decoding)

    def request_ids(self) -> list[int]:
        """Ids of the requests that are not finished."""
        return list(self._requests)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.pool.page_size)

    def add(self, request: Request) -> None:
        """Queue all samples of a request whose ids are new."""
        self._requests[request.request_id] = request
        for sequence in request.sequences:
            insort(self._waiting, sequence, key=_order)

    def abort(self, request_id: int) -> bool:
        """End every unfinished sample of a request. False if the id is unknown or finished.

        May be called at any time, in a step too; pages are returned exactly once.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self.end_all(request, "abort")
        return True

    def end_all(self, request: Request, reason: FinishReason) -> None:
        """End every unfinished sample of a request without a token, also while a step runs."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.end(reason)
                # The step in flight may still write this sequence's pages: commit lets them go.
                if self._in_flight is None or sequence not in self._in_flight.sequences:
                    self._release(sequence)
        self._forget_if_finished(request)

    def finish(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        """Return the pages of a sequence that has ended; `reason` ends it here without a token."""
        if reason is not None and sequence.finish_reason is None:
            sequence.end(reason)
        self._release(sequence)
        self._forget_if_finished(sequence.request)

    def _forget_if_finished(self, request: Request) -> None:
        if request.is_finished:
            self._requests.pop(request.request_id, None)

    # --- steps ------------------------------------------------------------------------------

    def schedule_prefill(self) -> ScheduledBatch | None:
        """Chunks of prompts (and of preempted sequences) within the token budget, or None."""
        self._check_idle()
        budget = self.max_step_tokens
        rows: list[tuple[Sequence, int]] = []
        for sequence in self._prefilling:
            if budget == 0:
                break
            chunk = min(budget, sequence.num_tokens - sequence.num_computed)
            rows.append((sequence, chunk))
            budget -= chunk
        position = 0
        while budget and position < len(self._waiting) and self.num_running < self.max_batch:
            sequence = self._waiting[position]
            if self._waits_for_sibling(sequence):
                position += 1
                continue
            if not self._start(sequence):
                break
            chunk = min(budget, sequence.num_tokens - sequence.num_computed)
            rows.append((sequence, chunk))
            budget -= chunk
        return self._launch(rows) if rows else None

    def schedule_decode(self) -> ScheduledBatch | None:
        """One new token for every decoding sequence that can have a page for it, or None."""
        self._check_idle()
        rows: list[tuple[Sequence, int]] = []
        for sequence in list(self._decoding):
            if sequence.state is SequenceState.DECODING and self._reserve_one(sequence):
                rows.append((sequence, 1))
        return self._launch(rows) if rows else None

    def commit(self, batch: ScheduledBatch) -> None:
        """Count the tokens that the forward pass has written; release what was aborted in it."""
        for sequence, q_len in zip(batch.sequences, batch.q_lens, strict=True):
            if sequence.finish_reason is None:
                self.pool.append(sequence.task_id, q_len)
                full_pages = sequence.num_computed // self.pool.page_size
                sequence.num_computed += q_len
                if sequence.num_computed // self.pool.page_size > full_pages:
                    self._index(sequence)
                request = sequence.request
                if request.max_new_tokens == 0 and sequence.num_computed == sequence.num_tokens:
                    self.end_all(request, "length")  # only the prompt was to be computed
        self._land()

    def rollback(self) -> None:
        """After a step that failed: every running sequence can go on as if it had not begun."""
        self._land()
        for sequence in (*self._prefilling, *self._decoding):
            # A sequence that was counted but got no token computes its last token again.
            sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
            if self.pool.length(sequence.task_id) > sequence.num_computed:
                self.pool.truncate(sequence.task_id, sequence.num_computed)
                # Truncating lets go of reserved pages too.
                missing = sequence.num_tokens - sequence.num_computed
                if not self.pool.try_reserve(sequence.task_id, missing):
                    self._preempt(sequence)

    def place(self, sequence: Sequence) -> None:
        """Make sure that a sequence which just got a token decodes next."""
        if sequence.state is SequenceState.PREFILLING:
            self._prefilling.remove(sequence)
            sequence.state = SequenceState.DECODING
            insort(self._decoding, sequence, key=_order)

    def _launch(self, rows: list[tuple[Sequence, int]]) -> ScheduledBatch:
        input_ids: list[int] = []
        sampled: list[int] = []
        scored: list[tuple[int, int, int]] = []
        for place, (sequence, q_len) in enumerate(rows):
            input_ids += sequence.tokens_from(sequence.num_computed, q_len)
            end, request = sequence.num_computed + q_len, sequence.request
            if end == sequence.num_tokens and request.max_new_tokens > 0:
                sampled.append(place)
            first = max(sequence.num_computed, request.num_scored)
            count = min(end, len(request.prompt_ids) - 1) - first
            if count > 0:
                scored.append((place, first, count))
        sequences, q_lens = [sequence for sequence, _ in rows], [q_len for _, q_len in rows]
        self._in_flight = ScheduledBatch(sequences, q_lens, input_ids, sampled, scored)
        return self._in_flight

    def _land(self) -> None:
        batch, self._in_flight = self._in_flight, None
        if batch is not None:
            for sequence in batch.sequences:
                if sequence.finish_reason is not None:
                    self._release(sequence)

    def _check_idle(self) -> None:
        if self._in_flight is not None:
            raise RuntimeError(
                "scheduler: a step is in flight; expected commit or rollback before the next"
            )

    # --- pages ------------------------------------------------------------------------------

    def _index(self, sequence: Sequence) -> None:
        """Let later sequences find the full pages of this one."""
        if self.prefix_caching:
            tokens = sequence.tokens_from(0, sequence.num_computed)
            self.pool.index_prefix(sequence.task_id, tokens, sequence.request.cache_salt)

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """True while another sample of the request is computing the prompt that they can share."""
        if len(sequence.request.prompt_ids) == 1:
            return False
        states = [other.state for other in sequence.request.sequences]
        return SequenceState.PREFILLING in states and SequenceState.DECODING not in states

    def _start(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to prefilling with pages for all its tokens, if they are free.

        A sample whose sibling decodes shares the pages of the prompt and computes only what
        follows, or the prompt's last token again if nothing does. Others begin behind the longest
        cached prefix.
        """
        # Only a decoding sibling reserves its next write at every step, as it has to once the page
        # it writes to is shared.
        siblings = sequence.request.sequences
        decoding = [other for other in siblings if other.state is SequenceState.DECODING]
        shared = unheld = 0
        tokens: list[int] = []
        salt = sequence.request.cache_salt
        if decoding:
            shared = min(len(sequence.request.prompt_ids), sequence.num_tokens - 1)
        elif self.prefix_caching:
            tokens = sequence.tokens_from(0, sequence.num_tokens)
            if sequence.request.num_scored < len(sequence.request.prompt_ids) - 1:
                # Tokens whose log probabilities are missing have to be computed. At least the last
                # token of what is looked up is.
                tokens = tokens[: sequence.request.num_scored + 1]
            shared, unheld = self.pool.match_prefix(tokens, salt)
        # A partly shared page is copied when it is written, so it counts as a new one; a cached one
        # that nobody holds counts as free until it is adopted.
        needed = self.pages_for(sequence.num_tokens) - shared // self.pool.page_size + unheld
        # A page for each running sequence stays free: a newcomer must not force a preemption at
        # once.
        if needed + self.num_running > self.pool.num_free_pages:
            if self.num_running:
                return False
            raise RuntimeError(
                f"scheduler: request {sequence.request.request_id} needs {needed} pages, "
                f"{self.pool.num_free_pages} of {self.pool.num_pages} are free with nothing "
                "running; expected a request that can never fit to be refused"
            )
        if decoding:
            self.pool.fork(decoding[0].task_id, sequence.task_id)
            self.pool.truncate(sequence.task_id, shared)
        elif shared:
            self.pool.adopt_prefix(sequence.task_id, tokens, salt)
        else:
            self.pool.add_task(sequence.task_id)
        sequence.request.note_cached(0 if decoding else shared)
        self._waiting.remove(sequence)
        sequence.num_computed = shared
        sequence.state = SequenceState.PREFILLING
        insort(self._prefilling, sequence, key=_order)
        if not self.pool.try_reserve(sequence.task_id, sequence.num_tokens - shared):
            raise RuntimeError(
                f"scheduler: {needed} pages could not be reserved with "
                f"{self.pool.num_free_pages} free; the page pool is inconsistent"
            )
        return True

    def _reserve_one(self, sequence: Sequence) -> bool:
        """A page for the next token, from the youngest if need be; False if that is `sequence`."""
        while not self.pool.try_reserve(sequence.task_id, 1):
            victim = max((*self._prefilling, *self._decoding), key=_order)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_order)

    def _release(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.FINISHED:
            return
        self._leave(sequence)
        sequence.state = SequenceState.FINISHED

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its list and return its pages, if it holds any."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
            return
        running = self._prefilling if sequence.state is SequenceState.PREFILLING else self._decoding
        running.remove(sequence)
        sequence.num_computed = 0
        self.pool.free_task(sequence.task_id)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
