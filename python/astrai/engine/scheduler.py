"""Which sequences run in the next step, and who owns the pages.

Continuous batching: sequences join and leave between steps. Prompts are computed in chunks under a
token budget, so a long prompt delays the decoding of others by one chunk at most. When pages run
out, the youngest running sequence gives up its pages and is computed again later (recompute
preemption, as in Kwon et al. 2023, "PagedAttention", arXiv:2309.06180).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
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
    def extend_indexed(self, task_id: int, first_token: int, tokens: list[int]) -> bool: ...
    def fork(self, parent: int, child: int) -> None: ...
    def try_reserve(self, task_id: int, num_new_tokens: int) -> bool: ...
    def try_reserve_one_each(self, task_ids: list[int]) -> int: ...
    def append_each(self, task_ids: list[int], nums_new_tokens: list[int]) -> None: ...
    def truncate(self, task_id: int, num_tokens: int) -> None: ...
    def free_task(self, task_id: int) -> None: ...
    def length(self, task_id: int) -> int: ...
    def pages(self, task_id: int) -> list[int]: ...


# Sequences that may start before one that does not fit, while it waits; then they wait too, and the
# pages that running sequences return are its own. No request starves.
MAX_OVERTAKES = 32
# Waiting sequences that do not fit and are looked at in a step.
MAX_BLOCKED = 4


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


@dataclass(frozen=True)
class _Start:
    """How a waiting sequence would start.

    leader        decoding sample of its request whose prompt pages it shares, if any
    num_shared    tokens that it need not compute
    tokens        its tokens, where they were looked up in the prefix index
    needed_pages  free pages that it takes
    """

    sequence: Sequence
    leader: Sequence | None
    num_shared: int
    tokens: list[int]
    needed_pages: int


class Scheduler:
    """Keeps the queue, the running sequences and the ownership of pages.

    The life of a step: `schedule_prefill` or `schedule_decode`, the forward pass, then `commit` (or
    `rollback` if the pass failed), then `place` or `finish` for each sampled sequence. Between
    schedule and commit the batch is in flight: `abort` may be called, pages stay put until commit.

    Order is by priority, then first come, first served, and never changes: a preempted sequence
    goes back to its place. The first running sequence is never preempted for another, so some
    sequence always finishes. A sequence that does not fit yet lets up to MAX_OVERTAKES later ones
    start before it; one that was preempted lets none. Running sequences of lower priority give way
    to a waiting one if that lets it start, so within a priority no request starves.

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

    def schedule_prefill(self, only: Request | None = None) -> ScheduledBatch | None:
        """Chunks of prompts (and of preempted sequences) within the token budget, or None.

        With `only`, what has been begun of that request goes on and nothing else.
        """
        self._check_idle()
        if only is None:
            self._make_way()
        budget = self.max_step_tokens
        rows: list[tuple[Sequence, int]] = []
        for sequence in self._prefill_order(only):
            chunk = min(budget, sequence.num_tokens - sequence.num_computed)
            rows.append((sequence, chunk))
            budget -= chunk
            if budget == 0:
                break
        return self._launch(rows) if rows else None

    def _prefill_order(self, only: Request | None) -> Iterator[Sequence]:
        """Sequences that are being read and, each in its place in order, those that start now.

        One starts when it is asked for, with the pages that the ones before have left.
        """
        if only is not None:
            yield from [s for s in self._prefilling if s.request is only]
            return
        reading = deque(self._prefilling)
        blocked: list[Sequence] = []
        for sequence in self._waiting.copy():
            while reading and _order(reading[0]) < _order(sequence):
                yield reading.popleft()
            if not self._try_start(sequence, blocked):
                break
            if sequence.state is SequenceState.PREFILLING:
                yield sequence
        yield from reading

    def _try_start(self, sequence: Sequence, blocked: list[Sequence]) -> bool:
        """Start a waiting sequence if it may and fits; False if no later one may either.

        blocked  those in front of it that do not fit; it joins them if it does not either
        """
        if self.num_running >= self.max_batch:
            return False
        if self._waits_for_sibling(sequence):
            return True
        if not all(_may_be_overtaken(other) for other in blocked):
            return False
        start = self._plan_start(sequence)
        if not self._fits(start):
            blocked.append(sequence)
            return len(blocked) < MAX_BLOCKED
        self._start(start)
        for other in blocked:
            other.num_overtaken += 1
        return True

    def schedule_decode(self, only: Request | None = None) -> ScheduledBatch | None:
        """One new token for every decoding sequence that can have a page for it, or None.

        With `only`, for the sequences of that request.
        """
        self._check_idle()
        rows = self._decoding_of(only)
        num_reserved = self.pool.try_reserve_one_each([row.task_id for row in rows])
        # Where pages ran out, one after the other: whoever is last in order gives up its own.
        for sequence in rows[num_reserved:]:
            if sequence.state is SequenceState.DECODING:
                self._reserve_one(sequence)
        if num_reserved < len(rows):
            rows = self._decoding_of(only)
        return self._launch_decode(rows) if rows else None

    def _decoding_of(self, only: Request | None) -> list[Sequence]:
        if only is None:
            return self._decoding.copy()
        return [sequence for sequence in self._decoding if sequence.request is only]

    def commit(self, batch: ScheduledBatch) -> None:
        """Count the tokens that the forward pass has written; release what was aborted in it."""
        page_size = self.pool.page_size
        self.pool.append_each(batch.task_ids, batch.q_lens)
        for sequence, q_len in zip(batch.sequences, batch.q_lens, strict=True):
            sequence.num_computed += q_len
            if sequence.finish_reason is not None:
                continue
            if sequence.num_computed % page_size < q_len:
                self._index(sequence)
            request = sequence.request
            if request.max_new_tokens == 0 and sequence.num_computed == sequence.num_tokens:
                self.end_all(request, sequence.empty_reason())  # only the prompt was wanted
        self._land()

    def rollback(self) -> None:
        """After a step that failed: every running sequence can go on as if it had not begun."""
        self._land()
        for sequence in (*self._prefilling, *self._decoding):
            # A sequence that was counted but got no token computes its last token again.
            sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
            page_size = self.pool.page_size
            full = sequence.num_computed // page_size * page_size
            sequence.num_indexed = min(sequence.num_indexed, full)
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
            sequence.request.is_prompt_computed = True
            insort(self._decoding, sequence, key=_order)

    def _launch_decode(self, rows: list[Sequence]) -> ScheduledBatch:
        input_ids = [sequence.output_ids[-1] for sequence in rows]
        self._in_flight = ScheduledBatch(rows, [1] * len(rows), input_ids, list(range(len(rows))))
        return self._in_flight

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
        if not self.prefix_caching:
            return
        end = sequence.num_computed // self.pool.page_size * self.pool.page_size
        first, sequence.num_indexed = sequence.num_indexed, end
        if first:
            tokens = sequence.tokens_from(first, end - first)
            if self.pool.extend_indexed(sequence.task_id, first, tokens):
                return
        tokens = sequence.tokens_from(0, end)
        self.pool.index_prefix(sequence.task_id, tokens, sequence.request.cache_salt)

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """True while another sample of the request is computing the prompt that they can share.

        Nobody waits once the prefix index has the prompt, or once a sample has ended and taken its
        pages with it: waiting for one after the other would make them run one by one.
        """
        request = sequence.request
        if len(request.prompt_ids) == 1 or (self.prefix_caching and request.is_prompt_computed):
            return False
        states = {other.state for other in request.sequences}
        is_shared_soon = SequenceState.PREFILLING in states
        return is_shared_soon and not states & {SequenceState.DECODING, SequenceState.FINISHED}

    def _make_way(self) -> None:
        """Let running sequences of lower priority give way to the first one in line.

        None does unless all of them together are enough.
        """
        first = next((s for s in self._waiting if not self._waits_for_sibling(s)), None)
        if first is None:
            return
        running = (*self._prefilling, *self._decoding)
        victims = [s for s in running if s.request.priority > first.request.priority]
        if not victims or not self._would_fit_without(victims, first):
            return
        victims.sort(key=_order)
        # A page that a queued copy still reads comes free a step later than expected.
        while victims and not (
            self.num_running < self.max_batch and self._fits(self._plan_start(first))
        ):
            self._preempt(victims.pop())

    def _would_fit_without(self, victims: list[Sequence], first: Sequence) -> bool:
        """Whether `first` could start if `victims` gave up their pages and places."""
        if self._fits(self._plan_start(first)):
            return True  # it lacks a place at most
        others = {*self._prefilling, *self._decoding}.difference(victims)
        held = {page for other in others for page in self.pool.pages(other.task_id)}
        freed = {page for victim in victims for page in self.pool.pages(victim.task_id)} - held
        # What it shares with a victim would have to be taken from the free pages, too.
        needed = self.pages_for(first.num_tokens) + len(others)
        return needed <= self.pool.num_free_pages + len(freed)

    def _plan_start(self, sequence: Sequence) -> _Start:
        """What a waiting sequence needs and what it can share.

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
        if decoding:
            shared = min(len(sequence.request.prompt_ids), sequence.num_tokens - 1)
        elif self.prefix_caching:
            tokens = sequence.tokens_from(0, sequence.num_tokens)
            if sequence.request.num_scored < len(sequence.request.prompt_ids) - 1:
                # Tokens whose log probabilities are missing have to be computed. At least the last
                # token of what is looked up is.
                tokens = tokens[: sequence.request.num_scored + 1]
            shared, unheld = self.pool.match_prefix(tokens, sequence.request.cache_salt)
        # A partly shared page is copied when it is written, so it counts as a new one; a cached one
        # that nobody holds counts as free until it is adopted.
        needed = self.pages_for(sequence.num_tokens) - shared // self.pool.page_size + unheld
        return _Start(sequence, decoding[0] if decoding else None, shared, tokens, needed)

    def _fits(self, start: _Start) -> bool:
        # A page for each running sequence stays free: a newcomer must not force a preemption at
        # once.
        if start.needed_pages + self.num_running <= self.pool.num_free_pages:
            return True
        if self.num_running:
            return False
        raise RuntimeError(
            f"scheduler: request {start.sequence.request.request_id} needs {start.needed_pages} "
            f"pages, {self.pool.num_free_pages} of {self.pool.num_pages} are free with nothing "
            "running; expected a request that can never fit to be refused"
        )

    def _start(self, start: _Start) -> None:
        """Move a waiting sequence to prefilling, with pages for all its tokens."""
        sequence, shared = start.sequence, start.num_shared
        if start.leader is not None:
            self.pool.fork(start.leader.task_id, sequence.task_id)
            self.pool.truncate(sequence.task_id, shared)
        elif shared:
            self.pool.adopt_prefix(sequence.task_id, start.tokens, sequence.request.cache_salt)
        else:
            self.pool.add_task(sequence.task_id)
        sequence.request.note_cached(0 if start.leader is not None else shared)
        self._waiting.remove(sequence)
        sequence.num_computed = shared
        sequence.num_indexed = 0 if start.leader is not None else shared
        sequence.state = SequenceState.PREFILLING
        insort(self._prefilling, sequence, key=_order)
        if not self.pool.try_reserve(sequence.task_id, sequence.num_tokens - shared):
            raise RuntimeError(
                f"scheduler: {start.needed_pages} pages could not be reserved with "
                f"{self.pool.num_free_pages} free; the page pool is inconsistent"
            )

    def _reserve_one(self, sequence: Sequence) -> bool:
        """A page for the next token, from the last in order if need be; False if it is the last."""
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


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return (sequence.request.priority, *sequence.order)


def _may_be_overtaken(blocked: Sequence) -> bool:
    """Whether one more may start before `blocked`, which is in front of it and does not fit.

    A sequence that was preempted shows that pages are short: to let others in would cost it its
    next start.
    """
    return blocked.num_overtaken < MAX_OVERTAKES and blocked.num_preemptions == 0
