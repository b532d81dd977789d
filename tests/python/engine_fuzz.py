"""Random traffic for the engine, held against an engine that runs one request at a time.

A scenario is a pure function of its seed: an engine with few pages, small chunks and a small batch,
and requests that arrive, stream, share prefixes and are aborted while others run. The reference
knows no batch, no chunks and no scheduler: it computes one sample after the other, each with a task
of its own in an empty cache. In float32 both must give the same tokens, unless the choice between
two is closer than the rounding between a token that was decoded and one that was computed again
with a prompt. That the cache itself is right is held against one pass over the finished text
without it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from astrai import LLM
from astrai.engine.options import RequestOptions
from astrai.engine.text import OutputText
from astrai.kv_cache import KVCache
from astrai.sampling import SamplingParams
from astrai.sampling.batch_info import SamplingRow
from astrai.sampling.random import stream_key
from astrai.sampling.sampler import RULED_OUT, Sampler
from engine_checks import check_empty

if TYPE_CHECKING:
    from astrai.engine import StreamEvent
    from astrai.loading import LoadedModel

PAGE_SIZES = (1, 2, 3, 4, 7, 8, 16)
MAX_CONTEXT = 96
# Of logits whose size is about 10, between two orders of summing.
LOGIT_TOLERANCE = 1e-3
# How far off logits are tried, and how often, before two tokens count as told apart. A draw may
# have fallen on the edge of a token that holds a millionth: large noise steps over it.
NEAR_TIE_NOISES = (1e-4, 1e-5, 1e-6)
NEAR_TIE_TRIES = 64


@dataclass(frozen=True)
class Arrival:
    """A request of a scenario.

    step         the step of the engine before which it arrives
    abort_after  events after which its reader walks away; None: it reads to the end
    """

    step: int
    prompt_ids: list[int]
    params: SamplingParams
    abort_after: int | None
    priority: int = 0


@dataclass(frozen=True)
class Scenario:
    """An engine's options and what happens to it."""

    seed: int
    options: dict[str, Any]
    arrivals: list[Arrival]


@dataclass
class Sample:
    """What one sample of a request came to; the logprobs of a ranked one are kept too."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)


@dataclass
class Answer:
    """What a request came to: every sample that was generated, and its prompt's logprobs."""

    samples: list[Sample]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    was_refused: bool = False


def make_scenario(seed: int, vocab_size: int) -> Scenario:
    """The scenario of a seed, over token ids 3 .. vocab_size - 1."""
    rng = random.Random(seed)
    page_size = rng.choice(PAGE_SIZES)
    # Prompts begin with one of a few shared texts, cut anywhere.
    stems = [_ids(rng, rng.randint(1, 48), vocab_size) for _ in range(rng.randint(1, 3))]
    arrivals = []
    step = 0
    for _ in range(rng.randint(1, 9)):
        step += rng.choice((0, 0, 0, 1, 2, 7))
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(0, len(stem))] + _ids(rng, rng.randint(1, 12), vocab_size)
        params = _params(rng, vocab_size)
        abort_after = rng.randint(0, 6) if rng.random() < 0.15 else None
        priority = rng.choice((0, 0, 0, -1, 1))
        arrivals.append(Arrival(step, prompt, params, abort_after, priority))
    longest = max(len(arrival.prompt_ids) + 25 for arrival in arrivals)
    needed = -(-longest // page_size)
    options = {
        "page_size": page_size,
        # Often barely enough for one request, so that others are preempted.
        "num_pages": needed + rng.choice((0, 0, 1, 3, needed, 8 * needed)),
        "max_batch": rng.choice((1, 2, 3, 5, 16)),
        "max_step_tokens": rng.choice((1, 2, 5, 8, 13, 64)),
        "max_context": MAX_CONTEXT,
        "prefix_caching": rng.random() < 0.8,
    }
    return Scenario(seed, options, arrivals)


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(3, vocab_size) for _ in range(count)]


def _params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Greedy in half of the cases, else seeded; every other option now and then."""

    def now_and_then(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.2 else default

    max_tokens = now_and_then(0, rng.randint(0, 24))
    n = rng.choice((1, 1, 1, 1, 2, 3))
    # Words over few letters, and often no other token: now and then nothing is left.
    letters = rng.choice(("abcdefgh", "abc", "ab"))
    words = ["".join(rng.choices(letters, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 5))]
    allowed = [ord(letter) + 4 for letter in letters]  # ids of single bytes follow 4 others
    allowed += rng.choice(([], [], _ids(rng, 6, vocab_size)))
    is_limited = rng.random() < 0.15
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.3, 0.8, 1.0, 1.7)),
        top_k=now_and_then(rng.choice((1, 2, 5, 40, 1000)), 0),
        top_p=now_and_then(rng.choice((0.0, 0.1, 0.5, 0.9, 0.999)), 1.0),
        min_p=now_and_then(rng.choice((0.01, 0.1, 0.5)), 0.0),
        frequency_penalty=now_and_then(rng.choice((-1.0, 0.5, 2.0)), 0.0),
        presence_penalty=now_and_then(rng.choice((-1.0, 0.5, 2.0)), 0.0),
        repetition_penalty=now_and_then(rng.choice((0.7, 1.3)), 1.0),
        seed=rng.randrange(2**31),
        n=n,
        best_of=now_and_then(n + rng.randint(0, 3), None),
        max_tokens=max_tokens,
        min_tokens=now_and_then(rng.randint(0, max_tokens), 0),
        stop=now_and_then([rng.choice(("e", "th", "o", "\x00", "zz"))], ()),
        stop_token_ids=now_and_then(_ids(rng, 12, vocab_size), ()),
        ignore_eos=rng.random() < 0.5,
        logit_bias=now_and_then({i: rng.uniform(-9, 9) for i in _ids(rng, 4, vocab_size)}, None),
        allowed_token_ids=allowed if is_limited else None,
        bad_words=words if is_limited else now_and_then(words, ()),
        logprobs=now_and_then(rng.randint(0, 3), None),
        prompt_logprobs=now_and_then(rng.randint(0, 3), None),
        include_stop_str_in_output=rng.random() < 0.3,
    )


class NaiveEngine:
    """Runs one sample at a time: the prompt in one pass, then token by token."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._kv = KVCache(
            loaded.config,
            num_pages=MAX_CONTEXT // 16,
            page_size=16,
            dtype=torch.float32,
            device="cpu",
            max_batch=1,
            max_context=MAX_CONTEXT,
            max_step_tokens=MAX_CONTEXT,
        )
        self._eos = frozenset(loaded.config.eos_token_ids)
        self.vocab_size = min(loaded.config.vocab_size, loaded.tokenizer.vocab_size)

    @torch.inference_mode()
    def run(self, prompt_ids: list[int], params: SamplingParams) -> Answer:
        """Every sample of a request."""
        if self._leaves_nothing(params):
            return Answer([], was_refused=True)
        samples = [self._sample(prompt_ids, params, index) for index in range(params.num_samples)]
        return Answer(samples, self._prompt_logprobs(prompt_ids, params.prompt_logprobs))

    def bad_ids(self, params: SamplingParams) -> list[list[int]]:
        """The bad words of `params`, none of which begins with a space, as token ids."""
        encode = self._tokenizer.encode
        texts = [text for word in params.bad_words for text in (word, " " + word)]
        return [encode(text, add_special_tokens=False) for text in texts]

    def _leaves_nothing(self, params: SamplingParams) -> bool:
        if params.allowed_token_ids is None:
            return False  # the words of a scenario are few
        left = set(params.allowed_token_ids)
        left -= {ids[0] for ids in self.bad_ids(params) if len(ids) == 1}
        if params.min_tokens:
            left -= self._stop_ids(params)
        return not left

    def _stop_ids(self, params: SamplingParams) -> set[int]:
        return set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos)

    def _prompt_logprobs(
        self, prompt_ids: list[int], count: int | None
    ) -> list[dict[int, float] | None] | None:
        if count is None:
            return None
        logits = self._model.compute_logits(self._model(torch.tensor(prompt_ids)))
        logprobs = logits[:, : self.vocab_size].double().log_softmax(dim=1)
        entries: list[dict[int, float] | None] = [None]
        for row, token_id in zip(logprobs, prompt_ids[1:], strict=False):
            likeliest = row.topk(count).indices.tolist()
            entries.append({i: float(row[i]) for i in (token_id, *likeliest)})
        return entries

    @torch.inference_mode()
    def nearly_chooses(
        self, prompt_ids: list[int], params: SamplingParams, index: int, token_ids: list[int]
    ) -> bool:
        """Whether the last of `token_ids` may follow the others when logits are a little off."""
        *before, wanted = token_ids
        row = self._row(prompt_ids, params, index, before)
        logits = self._model.compute_logits(self._model(torch.tensor(prompt_ids + before))[-1:])
        generator = torch.Generator().manual_seed(0)
        for size in NEAR_TIE_NOISES * NEAR_TIE_TRIES:
            noise = (torch.rand(logits.shape, generator=generator) * 2 - 1) * size
            sampler = Sampler(self.vocab_size)
            info = sampler.batch_info([row], logits.device)
            if sampler.sample(logits + noise, info).token_ids == [wanted]:
                return True
        return False

    def _row(
        self, prompt_ids: list[int], params: SamplingParams, index: int, output_ids: list[int]
    ) -> SamplingRow:
        assert params.seed is not None  # every scenario gives one
        key = stream_key(params.seed, index)
        stop_ids = tuple(sorted(self._stop_ids(params)))
        bad_ids = tuple(tuple(ids) for ids in self.bad_ids(params))
        return SamplingRow(params, prompt_ids, output_ids, key, stop_ids, bad_ids)

    def _sample(self, prompt_ids: list[int], params: SamplingParams, index: int) -> Sample:
        assert params.max_tokens is not None  # every scenario gives one
        sample = Sample()
        if params.max_tokens == 0:
            sample.finish_reason = "length"
            return sample
        row = self._row(prompt_ids, params, index, sample.token_ids)
        sampler = Sampler(self.vocab_size)
        text = OutputText(self._tokenizer, self._tokenizer.special_ids, params)
        limit = min(params.max_tokens, MAX_CONTEXT - len(prompt_ids))
        steps: list[torch.Tensor] = []
        self._kv.pool.add_task(0)
        while sample.finish_reason is None:
            logits = self._next_logits(prompt_ids if not steps else sample.token_ids[-1:])
            steps.append(logits.clone())  # the sampler changes its logits
            info = sampler.batch_info([row], logits.device)
            chosen = sampler.sample(logits, info)
            (token_id,) = chosen.token_ids
            if token_id == RULED_OUT:
                sample.text += text.end()
                sample.finish_reason = "error"
                continue
            sample.token_ids.append(token_id)
            if params.needs_logprobs:
                sample.logprobs.append(chosen.logprobs[0])
            if token_id in row.stop_ids:
                sample.text += text.end_by_token(token_id)
                sample.finish_reason, sample.stop_reason = "stop", token_id
                continue
            sample.text += text.add(token_id, len(sample.token_ids) > params.min_tokens)
            if len(sample.token_ids) >= limit:
                sample.text += text.end()
                sample.finish_reason = "length"
            if text.matched_stop is not None:
                sample.finish_reason, sample.stop_reason = "stop", text.matched_stop
        self._kv.pool.free_task(0)
        seen = len(steps) - 1  # tokens that were fed back
        self._check_against_dense(prompt_ids + sample.token_ids[:seen], torch.cat(steps))
        return sample

    def _next_logits(self, new_ids: list[int]) -> torch.Tensor:
        """Append tokens to the one task: the logits [1, V] after the last of them."""
        assert self._kv.pool.try_reserve(0, len(new_ids))
        step = self._kv.bind([0], [len(new_ids)])
        hidden = self._model(torch.tensor(new_ids), step.positions, self._kv)
        self._kv.pool.append(0, len(new_ids))
        return self._model.compute_logits(hidden[-1:])

    def _check_against_dense(self, ids: list[int], found: torch.Tensor) -> None:
        """The logits of every step against one pass over the text without a cache."""
        expected = self._model.compute_logits(self._model(torch.tensor(ids))[-len(found) :])
        torch.testing.assert_close(found, expected, atol=LOGIT_TOLERANCE, rtol=0)


class _Reader:
    """A stream of the engine and what came out of it."""

    def __init__(self, llm: LLM, arrival: Arrival) -> None:
        self.arrival = arrival
        self.answer = Answer([Sample() for _ in range(arrival.params.n)])
        self.is_done = False
        self._events = llm.stream(arrival.prompt_ids, arrival.params, priority=arrival.priority)
        self._num_events = 0

    def read(self) -> None:
        """Take one event, or walk away."""
        if self._num_events == self.arrival.abort_after:
            self._events.close()
            self.is_done = True
            return
        event = self._next()
        if event is None:
            self.is_done = True
            return
        sample = self.answer.samples[event.index]
        assert sample.finish_reason is None, "an event after the last one"
        assert event.prompt_logprobs is None or self._num_events == 0
        if self._num_events == 0:
            self.answer.prompt_logprobs = event.prompt_logprobs
        self._num_events += 1
        sample.token_ids += event.token_ids
        sample.text += event.text
        sample.logprobs += event.logprobs or []
        sample.finish_reason, sample.stop_reason = event.finish_reason, event.stop_reason

    def _next(self) -> StreamEvent | None:
        try:
            return next(self._events, None)
        except RuntimeError as problem:
            if "rule out every token" not in str(problem):
                raise
            assert any(sample.finish_reason == "error" for sample in self.answer.samples)
            return None


class _Runner:
    """A request whose samples are ranked: nothing is known of it before it has ended."""

    def __init__(self, llm: LLM, arrival: Arrival) -> None:
        self.arrival = arrival
        self.answer = Answer([])
        self.is_done = False
        self._core = llm._core
        prepared = llm._reader.read("fuzz", arrival.prompt_ids, arrival.params)
        self._request = llm._submit(prepared, RequestOptions(priority=arrival.priority))
        self._num_steps = 0

    def read(self) -> None:
        """Run one step, or walk away."""
        if self._num_steps == self.arrival.abort_after:
            self._core.abort(self._request.request_id)
        elif not self._request.is_finished:
            self._core.step()
            self._num_steps += 1
        if self._request.is_finished:
            self.is_done = True
            self._take()

    def _take(self) -> None:
        was_aborted = self.arrival.abort_after is not None
        for sequence in self._request.sequences:
            sample = Sample(list(sequence.output_ids), logprobs=sequence.logprobs)
            # An abort shows half of a character as it is: that text is not compared.
            if sequence.finish_reason != "abort":
                sample.text = "".join(sequence.pieces)
                sample.finish_reason = sequence.finish_reason
                sample.stop_reason = sequence.stop_reason
            self.answer.samples.append(sample)
        output = self._request.output()
        assert [sample.index for sample in output.outputs] == list(range(self.arrival.params.n))
        ranked = sorted(self.answer.samples, key=_score, reverse=True)
        for sample, expected in zip(output.outputs, ranked, strict=False):
            assert sample.token_ids == expected.token_ids
            assert sample.cumulative_logprob == _score(expected)
        if not was_aborted:
            self.answer.prompt_logprobs = output.prompt_logprobs


def _score(sample: Sample) -> float:
    """Added up in order, as the engine does; `sum` rounds otherwise in some Pythons."""
    total = 0.0
    for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        total += entry[token_id]
    return total


def _arrive(llm: LLM, arrival: Arrival) -> _Reader | _Runner | None:
    """Submit a request; None if it is refused because no token is left."""
    try:
        if arrival.params.num_samples > arrival.params.n:
            return _Runner(llm, arrival)
        return _Reader(llm, arrival)
    except ValueError as problem:
        if "allowed_token_ids and bad_words" not in str(problem):
            raise
        return None


def run_scenario(loaded: LoadedModel, scenario: Scenario) -> list[tuple[Arrival, Answer]]:
    """Play a scenario and check that the engine is empty and whole afterwards.

    Streams are read in turn, one event each, in an order drawn from the scenario's seed.
    """
    rng = random.Random(scenario.seed + 1)
    answers: list[tuple[Arrival, Answer]] = []
    readers: list[_Reader | _Runner] = []
    with LLM(loaded, **scenario.options) as llm:
        pool = llm.kv_cache.pool
        coming = list(scenario.arrivals)
        turn = 0
        while coming or not all(reader.is_done for reader in readers):
            while coming and coming[0].step <= turn:
                arrival = coming.pop(0)
                reader = _arrive(llm, arrival)
                if reader is None:
                    answers.append((arrival, Answer([], was_refused=True)))
                else:
                    answers.append((arrival, reader.answer))
                    readers.append(reader)
            open_readers = [reader for reader in readers if not reader.is_done]
            for reader in rng.sample(open_readers, len(open_readers)):
                reader.read()
            pool.check_integrity()
            turn += 1
        check_empty(llm)
    return answers


@dataclass
class Comparison:
    """What a scenario came to: tokens that were compared, samples given up at a near tie."""

    tokens: int = 0
    near_ties: int = 0


def check_scenario(loaded: LoadedModel, seed: int) -> Comparison:
    """Raise AssertionError where the engine and the naive one differ."""
    naive = NaiveEngine(loaded)
    scenario = make_scenario(seed, naive.vocab_size)
    result = Comparison()
    for place, (arrival, found) in enumerate(run_scenario(loaded, scenario)):
        expected = naive.run(arrival.prompt_ids, arrival.params)
        request = f"seed {seed}, request {place}"
        assert found.was_refused == expected.was_refused, request
        if found.prompt_logprobs is not None or arrival.abort_after is None:
            _compare_prompt(request, found.prompt_logprobs, expected.prompt_logprobs)
        for index, (mine, reference) in enumerate(
            zip(found.samples, expected.samples, strict=True)
        ):
            where = f"{request}, sample {index}"
            _check_bans(where, mine.token_ids, arrival.params, naive.bad_ids(arrival.params))
            same = _common_length(mine.token_ids, reference.token_ids)
            if same < min(len(mine.token_ids), len(reference.token_ids)):
                chosen = mine.token_ids[: same + 1]
                assert naive.nearly_chooses(arrival.prompt_ids, arrival.params, index, chosen), (
                    f"{where}, token {same}: {mine.token_ids} instead of {reference.token_ids}"
                )
                result.near_ties += 1
            else:
                _compare(where, mine, reference, is_whole=arrival.abort_after is None)
            result.tokens += same
    return result


def _common_length(first: list[int], second: list[int]) -> int:
    same = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        same += 1
    return same


def _check_bans(
    where: str, token_ids: list[int], params: SamplingParams, bad_ids: list[list[int]]
) -> None:
    """No bad word stands in the output, and nothing but what is allowed."""
    if params.allowed_token_ids is not None:
        assert set(token_ids) <= set(params.allowed_token_ids), where
    for word in bad_ids:
        parts = (token_ids[i : i + len(word)] for i in range(len(token_ids)))
        assert word not in parts, f"{where}: {word} in {token_ids}"


def _compare_prompt(
    where: str,
    found: list[dict[int, float] | None] | None,
    expected: list[dict[int, float] | None] | None,
) -> None:
    if found is None or expected is None:
        assert found is expected, where
        return
    assert len(found) == len(expected), where
    for mine, reference in zip(found, expected, strict=True):
        if mine is None or reference is None:
            assert mine is reference, where
        else:
            assert list(mine) == list(reference), where
            differences = [abs(mine[token_id] - reference[token_id]) for token_id in mine]
            assert max(differences) < LOGIT_TOLERANCE, where


def _compare(where: str, mine: Sample, reference: Sample, is_whole: bool) -> None:
    count = len(mine.token_ids)
    assert count <= len(reference.token_ids), where
    assert reference.text.startswith(mine.text), where
    assert len(mine.logprobs) == min(count, len(reference.logprobs)), where
    for found, expected in zip(mine.logprobs, reference.logprobs, strict=False):
        assert found.keys() == expected.keys(), where
        differences = [abs(found[token_id] - expected[token_id]) for token_id in found]
        assert max(differences) < LOGIT_TOLERANCE, where
    if is_whole:
        assert count == len(reference.token_ids), where
        assert mine.text == reference.text, where
        assert mine.finish_reason == reference.finish_reason, where
        assert mine.stop_reason == reference.stop_reason, where
