"""Reuse of computed prefixes: what is found, what is not, and that the answer stays the same."""

from __future__ import annotations

import pytest

from astrai.sampling import SamplingParams

X, Y = [1 + 9, 2 + 9, 3 + 9, 4 + 9, 5 + 9], [99] * 5
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def tokens(output):
    return output.outputs[0].token_ids


def run(llm, prompt, params=GREEDY, **options):
    (output,) = llm.generate(prompt, params, **options)
    return tokens(output), output.metrics.cached_tokens


def test_a_page_with_new_contents_is_not_found(make_llm):
    plain = make_llm(page_size=4, prefix_caching=False)
    small = make_llm(page_size=4, num_pages=2, max_context=8)
    first = run(small, X)
    assert first == (run(plain, X)[0], 0)
    assert run(small, Y) == (run(plain, Y)[0], 0)
    assert run(small, X) == first


def test_a_page_that_is_still_there_is_found(make_llm):
    llm = make_llm(page_size=4, num_pages=6)
    first, _ = run(llm, X)
    assert run(llm, X) == (first, 4)
    assert llm.stats().free_pages == 6


def test_two_at_once_share_and_what_follows_evicts(make_llm):
    plain = make_llm(page_size=4, prefix_caching=False)
    llm = make_llm(page_size=4, num_pages=6)
    long = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prefix = [20, 21, 22, 23, 24, 25, 26, 27]
    prompts = [[*prefix, 30], [*prefix, 31]]
    first = llm.stream(prompts[0], long)
    taken = [next(first).token_ids[0]]
    second = llm.stream(prompts[1], long)
    taken_second = [next(second).token_ids[0]]
    for start in range(40, 48):
        assert run(llm, [start] * 5)[0] == run(plain, [start] * 5)[0]
    taken += [event.token_ids[0] for event in first]
    taken_second += [event.token_ids[0] for event in second]
    expected = plain.generate(prompts, long)
    assert [taken, taken_second] == [tokens(output) for output in expected]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_next_turn_of_a_chat_starts_behind_the_last(make_llm, page_size):
    llm = make_llm(page_size=page_size)
    prompt = list(range(10, 45))
    answer, cached = run(llm, prompt)
    assert cached == 0
    # The last token of an answer was never computed.
    known = [*prompt, *answer[:-1]]
    _, cached = run(llm, [*prompt, *answer, 50, 51])
    assert cached == len(known) // page_size * page_size


def test_a_wholly_cached_prompt_computes_its_last_token(make_llm):
    llm = make_llm(page_size=4)
    prompt = list(range(10, 26))
    first, _ = run(llm, prompt)
    assert run(llm, prompt) == (first, 12)


def test_tenants_do_not_share(make_llm):
    llm = make_llm(page_size=4)
    prompt = list(range(10, 26))
    first, _ = run(llm, prompt, cache_salt="one")
    assert run(llm, prompt, cache_salt="two") == (first, 0)
    assert run(llm, prompt) == (first, 0)
    assert run(llm, prompt, cache_salt="one") == (first, 12)
    with pytest.raises(TypeError, match="generate: cache_salt is 7; expected a string"):
        run(llm, prompt, cache_salt=7)


def test_caching_can_be_off(make_llm):
    llm = make_llm(page_size=4, prefix_caching=False)
    first = run(llm, X)
    assert run(llm, X) == first
    assert first[1] == 0


def test_a_preempted_request_finds_what_it_had_computed(make_llm):
    """The oldest goes on, the youngest gives its pages up and is computed again."""
    prompts = [list(range(10, 18)), list(range(30, 38))]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm = make_llm(page_size=4, num_pages=8)
    outputs = llm.generate(prompts, params)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    plain = make_llm(prefix_caching=False).generate(prompts, params)
    assert [tokens(o) for o in outputs] == [tokens(o) for o in plain]
