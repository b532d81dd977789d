"""A request's tokens depend on the request alone, not on neighbours, chunks or preemption."""

from __future__ import annotations

import random

import pytest

from astrai.sampling import SamplingParams

PROMPT = [104, 101, 9, 40, 77]
SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)


def tokens(outputs):
    """Token ids of every sample of every request."""
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def greedy(max_tokens=40, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def prompts_of(*lengths, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(4, 267) for _ in range(length)] for length in lengths]


@pytest.fixture
def alone(make_llm):
    """What the seeded request gives on its own."""
    (output,) = make_llm().generate(PROMPT, SEEDED)
    (sample,) = output.outputs
    assert len(set(sample.token_ids)) > 4, "the tiny model must not be certain of everything"
    return sample.token_ids


def neighbour(seed=None, **params):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 16, "seed": seed, **params})


@pytest.mark.parametrize(
    "others",
    [
        [neighbour()],
        [neighbour(seed=7)],
        [neighbour(), neighbour(seed=7), SamplingParams(temperature=0, max_tokens=16)],
        [neighbour(top_k=3), neighbour(top_p=0.5), neighbour(repetition_penalty=1.3)],
        [neighbour(bad_words=["a", "th"]), neighbour(allowed_token_ids=range(40, 60))],
        [neighbour(best_of=3), neighbour(prompt_logprobs=2), neighbour(logprobs=1)],
    ],
    ids=["unseeded", "seeded", "mixed", "filtered", "limited", "scored"],
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_seeded_request_ignores_its_neighbours(make_llm, alone, others, place):
    prompts = prompts_of(*range(3, 3 + len(others)))
    if place == "first":
        outputs = make_llm().generate([PROMPT, *prompts], [SEEDED, *others])
        assert outputs[0].outputs[0].token_ids == alone
    else:
        outputs = make_llm().generate([*prompts, PROMPT], [*others, SEEDED])
        assert outputs[-1].outputs[0].token_ids == alone


@pytest.mark.parametrize("row", [0, 7])
def test_seeded_request_in_any_row(make_llm, alone, row):
    prompts = prompts_of(*[4] * 7)
    prompts.insert(row, PROMPT)
    params = [neighbour(seed=i) for i in range(7)]
    params.insert(row, SEEDED)
    assert make_llm().generate(prompts, params)[row].outputs[0].token_ids == alone


def test_two_copies_in_one_batch_are_equal(make_llm, alone):
    outputs = make_llm().generate([PROMPT, PROMPT], SEEDED)
    assert tokens(outputs) == [[alone], [alone]]


def test_neighbour_that_joins_and_leaves_changes_nothing(make_llm, alone):
    llm = make_llm()
    own = llm.stream(PROMPT, SEEDED)
    seen = [next(own).token_ids[0] for _ in range(5)]
    other = llm.stream(prompts_of(6)[0], neighbour(max_tokens=100, ignore_eos=True))
    next(other)
    seen += [next(own).token_ids[0] for _ in range(4)]
    other.close()
    seen += [event.token_ids[0] for event in own]
    assert seen == alone


@pytest.mark.parametrize("max_step_tokens", [1, 2, 4, 5, 6])
def test_chunked_prompt_gives_the_same_tokens(make_llm, alone, max_step_tokens):
    llm = make_llm(max_step_tokens=max_step_tokens)
    outputs = llm.generate([prompts_of(9)[0], PROMPT], [neighbour(seed=1), SEEDED])
    assert outputs[1].outputs[0].token_ids == alone


def test_preempted_request_gives_the_same_tokens(make_llm, alone):
    llm = make_llm(num_pages=6, page_size=4, max_step_tokens=5)
    outputs = llm.generate([prompts_of(5)[0], PROMPT], [greedy(max_tokens=16), SEEDED])
    assert outputs[1].metrics.preemptions > 0
    assert outputs[1].outputs[0].token_ids == alone


def test_samples_differ_and_repeat(make_llm):
    params = SamplingParams(temperature=0.8, seed=42, n=3, max_tokens=16, ignore_eos=True)
    first, again = (tokens(make_llm().generate(PROMPT, params))[0] for _ in range(2))
    assert first == again
    assert len({tuple(sample) for sample in first}) == 3
    single = tokens(make_llm().generate(PROMPT, SEEDED))[0]
    assert first[0] == single[0], "sample 0 is what n=1 gives"


@pytest.mark.parametrize(
    "params",
    [
        {"bad_words": ["a", "th", "\x05\x06"]},
        {"allowed_token_ids": range(40, 140), "top_k": 30},
        {"prompt_logprobs": 1},
        {"best_of": 4},
        {"min_p": 0.01, "min_tokens": 4, "stop_token_ids": [9]},
    ],
    ids=str,
)
def test_every_kind_of_request_repeats_in_other_company(make_llm, params):
    """Alone, chunked, preempted and as the last of a crowd: the same tokens for the same seed."""
    own = SamplingParams(seed=3, max_tokens=16, ignore_eos=True, **params)
    (expected,) = tokens(make_llm().generate(PROMPT, own))
    crowd = prompts_of(5, 9, 20)
    others = [neighbour(top_k=5), greedy(16), neighbour(bad_words="e", seed=1)]
    for options in ({}, {"num_pages": 10, "page_size": 4, "max_step_tokens": 3}):
        llm = make_llm(**options)
        outputs = llm.generate([*crowd, PROMPT], [*others, own])
        assert tokens(outputs)[-1] == expected
        assert not options or llm.stats().preemptions > 0


def test_unseeded_requests_differ(make_llm):
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    outputs = tokens(make_llm().generate([PROMPT] * 4, params))
    assert len({tuple(sample) for (sample,) in outputs}) == 4


def test_engine_seed_makes_unseeded_requests_repeatable(make_llm):
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    first, again = (tokens(make_llm(seed=5).generate([PROMPT] * 3, params)) for _ in range(2))
    assert first == again
    assert len({tuple(sample) for (sample,) in first}) == 3
    assert tokens(make_llm(seed=6).generate([PROMPT] * 3, params)) != first


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("max_step_tokens", [1, 7, 2048])
def test_greedy_does_not_depend_on_pages_or_chunks(make_llm, page_size, max_step_tokens):
    prompts = prompts_of(1, 2, 17, 30)
    expected = [tokens(make_llm().generate(prompt, greedy(max_tokens=20)))[0] for prompt in prompts]
    llm = make_llm(page_size=page_size, max_step_tokens=max_step_tokens)
    assert tokens(llm.generate(prompts, greedy(max_tokens=20))) == expected


@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True),
        SamplingParams(
            temperature=1.0,
            seed=5,
            max_tokens=40,
            ignore_eos=True,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            logprobs=2,
        ),
        SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True, n=2),
    ],
    ids=["greedy", "seeded", "penalties", "samples"],
)
def test_small_pool_gives_what_a_large_pool_gives(make_llm, params):
    prompts = prompts_of(3, 3, 20, 37)
    expected = make_llm().generate(prompts, params)
    llm = make_llm(num_pages=7, max_step_tokens=8)
    outputs = llm.generate(prompts, params)
    assert llm.stats().preemptions > 0
    assert sum(output.metrics.preemptions for output in outputs) == llm.stats().preemptions
    assert tokens(outputs) == tokens(expected)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.metrics.output_tokens == params.n * params.max_tokens
        for sample, other in zip(output.outputs, reference.outputs, strict=True):
            assert sample.text == other.text
            if params.logprobs is not None:
                assert len(sample.logprobs) == params.max_tokens
                for step, expected_step in zip(sample.logprobs, other.logprobs, strict=True):
                    assert step == pytest.approx(expected_step, abs=1e-4)


def test_stop_string_half_seen_at_preemption(make_llm, tiny_model, monkeypatch):
    prompts = prompts_of(3, 3, 20, 37)
    # Letters by bias, so that each token is one character of the text.
    letters = {tiny_model.tokenizer.encode(c)[0]: 100.0 for c in "abcdefgh"}
    free = SamplingParams(seed=5, max_tokens=40, logit_bias=letters)
    preempted = []
    llm = make_llm(num_pages=7, max_step_tokens=8)
    preempt = llm._core.scheduler._preempt

    def recording(sequence):
        preempted.append((sequence.request.prompt_ids, len(sequence.output_ids)))
        preempt(sequence)

    monkeypatch.setattr(llm._core.scheduler, "_preempt", recording)
    texts = [output.outputs[0].text for output in llm.generate(prompts, free)]
    prompt, cut = next(entry for entry in preempted if entry[1] >= 3)
    i = prompts.index(prompt)
    stop = texts[i][cut - 3 : cut + 3]
    assert texts[i].index(stop) == cut - 3
    params = [free] * 4
    params[i] = SamplingParams(seed=5, max_tokens=40, logit_bias=letters, stop=stop)
    output = make_llm(num_pages=7, max_step_tokens=8).generate(prompts, params)[i]
    assert output.metrics.preemptions > 0
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == texts[i][: cut - 3]
    assert output.outputs[0] == make_llm().generate(prompts, params)[i].outputs[0]


def test_streams_of_a_small_pool_give_each_token_once(make_llm):
    prompts = prompts_of(3, 3, 20, 37)
    expected = make_llm().generate(prompts, greedy())
    llm = make_llm(num_pages=7, max_step_tokens=8)
    streams = [llm.stream(prompt, greedy()) for prompt in prompts]
    events = [[] for _ in prompts]
    unfinished = set(range(4))
    while unfinished:
        for i in sorted(unfinished):
            event = next(streams[i], None)
            if event is None:
                unfinished.discard(i)
            else:
                events[i].append(event)
    assert llm.stats().preemptions > 0
    for seen, reference in zip(events, expected, strict=True):
        assert [t for event in seen for t in event.token_ids] == reference.outputs[0].token_ids
        assert "".join(event.text for event in seen) == reference.outputs[0].text
        assert [event.finish_reason for event in seen] == [None] * 39 + ["length"]


def test_more_requests_than_places_all_finish(make_llm):
    prompts = prompts_of(*[3, 8, 21] * 5)
    expected = [tokens(make_llm().generate(p, greedy(max_tokens=9)))[0] for p in prompts]
    llm = make_llm(max_batch=3, max_step_tokens=10)
    assert tokens(llm.generate(prompts, greedy(max_tokens=9))) == expected


def test_aborted_streams_leave_the_others_unchanged(make_llm):
    """Streams begin and are closed in random order; the survivors give what they give alone."""
    rng = random.Random(3)
    prompts = prompts_of(*[rng.randint(1, 24) for _ in range(6)], seed=8)
    expected = [tokens(make_llm().generate(p, greedy(max_tokens=20)))[0][0] for p in prompts]
    llm = make_llm(num_pages=12, page_size=4, max_step_tokens=6)
    for _ in range(8):
        streams = {i: llm.stream(prompts[i], greedy(max_tokens=20)) for i in range(6)}
        seen = {i: [] for i in range(6)}
        closed = set()
        while streams:
            i = rng.choice(sorted(streams))
            if rng.random() < 0.04:
                streams.pop(i).close()
                closed.add(i)
                continue
            event = next(streams[i], None)
            if event is None:
                streams.pop(i)
            else:
                seen[i] += event.token_ids
        for i in range(6):
            assert seen[i] == expected[i][: len(seen[i])]
            assert i in closed or len(seen[i]) == 20
        assert llm.stats().free_pages == 12


def test_the_more_urgent_request_is_served_first(make_llm):
    """And a running one gives way to it, and still gets the text that it would get alone."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[10, 11, 12], [20, 21], [30]]
    expected = [o.outputs[0].token_ids for o in make_llm().generate(prompts, params)]
    llm = make_llm(max_batch=1)
    patient = llm.stream(prompts[0], params, priority=5)
    taken = [next(patient).token_ids[0]]
    soon = llm.stream(prompts[1], params, priority=1)
    assert next(soon).token_ids
    (first,) = llm.generate([prompts[2]], params, priority=-1)
    assert first.metrics.preemptions == 0
    assert first.outputs[0].token_ids == expected[2]
    assert llm.stats().preemptions == 2
    rest = [event.token_ids[0] for event in soon]
    assert rest == expected[1][1:]
    taken += [event.token_ids[0] for event in patient]
    assert taken == expected[0]
    with pytest.raises(TypeError, match="generate: priority is 'high'; expected an integer"):
        llm.generate(prompts, params, priority="high")
