"""A submitted prompt and the samples that are generated from it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from enum import Enum
from typing import TYPE_CHECKING

from astrai.engine.detokenizer import PieceSource
from astrai.engine.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    StreamEvent,
)
from astrai.engine.text import OutputText
from astrai.sampling.batch_info import SamplingRow
from astrai.sampling.logprobs import TokenLogprobs
from astrai.sampling.params import SamplingParams
from astrai.sampling.random import stream_key

if TYPE_CHECKING:
    from astrai.structured.compiler import CompiledGrammar
    from astrai.structured.matcher import GrammarMatcher


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # holds no pages
    PREFILLING = "prefilling"  # holds pages for all its tokens, some not yet computed
    DECODING = "decoding"  # all but the newest token computed
    FINISHED = "finished"  # holds no pages, will not run again


class Sequence:
    """One sample of a request.

    error         why it ended with finish_reason "error": what was found and what was expected
    task_id       its name in the page pool
    num_computed  tokens whose keys and values are in the pool
    num_indexed   of those, tokens in pages that were put into the prefix index
    num_overtaken  younger sequences that started while it did not fit
    matcher       where the output is in the request's grammar; None without one
    """

    __slots__ = (
        "cumulative_logprob",
        "error",
        "finish_reason",
        "index",
        "logprobs",
        "matcher",
        "num_computed",
        "num_indexed",
        "num_overtaken",
        "num_preemptions",
        "order",
        "output_ids",
        "pieces",
        "request",
        "row",
        "state",
        "stop_reason",
        "task_id",
        "text",
    )

    def __init__(self, request: Request, index: int, task_id: int, text: OutputText) -> None:
        self.request = request
        self.index = index
        self.task_id = task_id
        # Samples are served in the order in which they arrived; this is never changed.
        self.order = (request.request_id, index)
        self.state = SequenceState.WAITING
        self.num_computed = 0
        self.num_indexed = 0
        self.num_overtaken = 0
        self.num_preemptions = 0
        self.output_ids: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.cumulative_logprob = 0.0
        self.error: str | None = None
        self.text = text
        self.pieces: list[str] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        grammar = request.grammar
        self.matcher: GrammarMatcher | None = None if grammar is None else grammar.new_matcher()
        self.row = SamplingRow(
            request.params,
            request.prompt_ids,
            self.output_ids,
            stream_key(request.seed, index),
            tuple(sorted(request.stop_ids)),
            request.bad_ids,
            self.matcher,
        )

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what has been generated."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    def tokens_from(self, start: int, count: int) -> list[int]:
        """Known tokens start .. start + count."""
        prompt = self.request.prompt_ids
        end = start + count
        if end <= len(prompt):
            return prompt[start:end]
        first = max(start - len(prompt), 0)
        return prompt[start:] + self.output_ids[first : end - len(prompt)]

    def accept(self, token_id: int, logprobs: dict[int, float] | None, now: float) -> bool:
        """Append a sampled token and work out its text. True if the sample ends with it."""
        request, params = self.request, self.request.params
        self.output_ids.append(token_id)
        if logprobs is not None:
            self.cumulative_logprob += logprobs[token_id]
            self.logprobs.append(logprobs)
        if token_id in request.stop_ids:
            piece = self.text.end_by_token(token_id)
            self.finish_reason, self.stop_reason = "stop", token_id
        else:
            piece = self.text.add(token_id, len(self.output_ids) > params.min_tokens)
            is_over = self.is_grammar_over()
            if is_over or len(self.output_ids) >= request.max_new_tokens:
                piece += self.text.end()
                self.finish_reason = "stop" if is_over else "length"
            # A stop string that is complete with the last token counts more than the limit.
            if self.text.matched_stop is not None:
                self.finish_reason, self.stop_reason = "stop", self.text.matched_stop
        if piece:
            self.pieces.append(piece)
        request.note_token(now)
        request.emit(self, piece, [token_id], [logprobs] if logprobs is not None else None)
        return self.finish_reason is not None

    def empty_reason(self) -> FinishReason:
        """Why a sample ends that may have no token."""
        return "stop" if self.is_grammar_over() else "length"

    def is_grammar_over(self) -> bool:
        """True when the output is complete, its grammar allows no more and no id can say so.

        With ids that end the sample the model chooses one of them, unless min_tokens still rules
        them out: the grammar counts more than min_tokens.
        """
        if self.matcher is None:
            return False
        self.matcher.follow(self.output_ids)
        has_end = self.request.stop_ids and len(self.output_ids) >= self.request.params.min_tokens
        return not has_end and self.matcher.must_end()

    def end(self, reason: FinishReason) -> None:
        """End without a token: aborted, failed, or asked for nothing."""
        piece = self.text.end()
        if piece:
            self.pieces.append(piece)
        self.finish_reason = reason
        self.request.emit(self, piece, [], None)

    def output(self, index: int) -> CompletionOutput:
        """The finished sample, as number `index` of those that are returned."""
        assert self.finish_reason is not None  # asked of finished sequences only
        params = self.row.params
        return CompletionOutput(
            index=index,
            text="".join(self.pieces),
            token_ids=list(self.output_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=list(self.logprobs) if params.logprobs is not None else None,
            cumulative_logprob=self.cumulative_logprob if params.needs_logprobs else None,
        )


class Request:
    """A checked prompt with everything that decides its output.

    prompt          text as given or rendered, None for token ids
    seed            the seed in force, drawn by the engine when the caller gave none
    max_new_tokens  tokens each sample may generate, cut to the room there is
    stop_ids        ids that end a sample
    bad_ids         the bad words as token ids
    is_prompt_computed  True once a sample has begun to decode
    num_scored      tokens of the prompt, from its first on, whose successor's log probability is
                    known or not wanted
    cache_salt      only requests with the same one share cached prefixes
    priority        the lower it is, the sooner the request is served
    grammar         what params.structured asks of each output, compiled; None without it
    events          what a stream reader has not taken yet; None when nobody streams
    error           what kept the request from being computed; its samples ended with "error" then
    """

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_new_tokens: int,
        stop_ids: Collection[int],
        bad_ids: tuple[tuple[int, ...], ...] = (),
        cache_salt: str = "",
        priority: int = 0,
        streaming: bool = False,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(stop_ids)
        self.bad_ids = bad_ids
        self.cache_salt = cache_salt
        self.priority = priority
        self.grammar = grammar
        self.events: deque[StreamEvent] | None = deque() if streaming else None
        self.error: Exception | None = None
        self.sequences: list[Sequence] = []
        self.arrival = time.perf_counter()
        self.num_scored = len(prompt_ids) - 1
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.num_scored = 0
            self.prompt_logprobs = [None] * len(prompt_ids)
        self._shows_prompt_logprobs = self.prompt_logprobs is not None
        self.is_prompt_computed = False
        self._cached_tokens: int | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None

    def make_sequences(
        self, first_task_id: int, tokenizer: PieceSource, special_ids: Collection[int]
    ) -> list[Sequence]:
        """Create the samples, with task ids from `first_task_id` on."""
        self.sequences = [
            Sequence(self, i, first_task_id + i, OutputText(tokenizer, special_ids, self.params))
            for i in range(self.params.num_samples)
        ]
        return self.sequences

    @property
    def is_finished(self) -> bool:
        """True when every sample has ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_finished(self) -> int:
        """Samples that have ended."""
        return sum(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated by all samples so far."""
        return sum(len(sequence.output_ids) for sequence in self.sequences)

    def note_cached(self, num_tokens: int) -> None:
        """Remember how many tokens the first sample to start found cached."""
        if self._cached_tokens is None:
            self._cached_tokens = num_tokens

    def note_prompt_logprobs(self, first: int, entries: list[TokenLogprobs]) -> None:
        """Keep what the tokens from `first` on tell about their successors.

        Kept by position: a step that failed and is run again changes nothing.
        """
        assert self.prompt_logprobs is not None  # only rows that asked are scored
        self.prompt_logprobs[first + 1 : first + 1 + len(entries)] = entries
        self.num_scored = max(self.num_scored, first + len(entries))

    def note_token(self, now: float) -> None:
        """Remember when tokens came (seconds, perf_counter)."""
        if self._first_token is None:
            self._first_token = now
        self._last_token = now

    def emit(
        self,
        sequence: Sequence,
        text: str,
        token_ids: list[int],
        logprobs: list[dict[int, float]] | None,
    ) -> None:
        """Queue an event if somebody streams this request."""
        if self.events is not None:
            shown = self.prompt_logprobs if self._shows_prompt_logprobs else None
            self._shows_prompt_logprobs = False
            self.events.append(
                StreamEvent(
                    text=text,
                    token_ids=token_ids,
                    index=sequence.index,
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                    logprobs=logprobs,
                    prompt_logprobs=None if shown is None else list(shown),
                )
            )

    def metrics(self) -> RequestMetrics:
        """Counts and times so far."""
        to_first = rate = None
        if self._first_token is not None and self._last_token is not None:
            to_first = self._first_token - self.arrival
            seconds = self._last_token - self._first_token
            later = sum(max(len(s.output_ids) - 1, 0) for s in self.sequences)
            rate = later / seconds if later and seconds > 0 else None
        return RequestMetrics(
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self._cached_tokens or 0,
            output_tokens=self.num_output_tokens,
            time_to_first_token_s=to_first,
            decode_tokens_per_s=rate,
            preemptions=sum(s.num_preemptions for s in self.sequences),
        )

    def returned(self) -> list[Sequence]:
        """The n samples to return: of more, the likeliest, best first and then in order."""
        n = self.params.n
        if len(self.sequences) == n:
            return self.sequences
        return sorted(self.sequences, key=lambda s: -s.cumulative_logprob)[:n]

    def output(self) -> RequestOutput:
        """The finished request."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            outputs=[sequence.output(i) for i, sequence in enumerate(self.returned())],
            metrics=self.metrics(),
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
        )
