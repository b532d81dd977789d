"""Log probabilities of a prompt: the same whatever the chunks, the cache and the company."""

from __future__ import annotations

import pytest
import torch

from astrai.engine import executor
from astrai.engine.options import RequestOptions
from astrai.sampling import SamplingParams

PROMPT = [104, 101, 9, 40, 77, 9, 9, 131, 250, 4]
OTHER = [60, 61, 62, 9, 63, 64, 65]


def asking(count=3, max_tokens=5, **params):
    values = {"temperature": 0, "ignore_eos": True, **params}
    return SamplingParams(prompt_logprobs=count, max_tokens=max_tokens, **values)


def dense(tiny_model, prompt, count):
    """What one pass over the prompt without a cache gives."""
    vocab_size = tiny_model.tokenizer.vocab_size
    model = tiny_model.model
    with torch.no_grad():
        logits = model.compute_logits(model(torch.tensor([prompt])))[0, :, :vocab_size]
    logprobs = logits.double().log_softmax(dim=1)
    entries = [None]
    for row, token in zip(logprobs, prompt[1:], strict=False):
        values, ids = row.topk(count)
        likeliest = zip(ids.tolist(), values.tolist(), strict=True)
        entries.append({token: float(row[token]), **dict(likeliest)})
    return entries


def check(found, expected):
    assert len(found) == len(expected)
    assert found[0] is None
    for entry, reference in zip(found[1:], expected[1:], strict=True):
        assert list(entry) == list(reference)
        assert entry == pytest.approx(reference, abs=1e-4)


@pytest.fixture
def expected(tiny_model):
    return dense(tiny_model, PROMPT, 3)


@pytest.mark.parametrize("max_step_tokens", [1, 3, 4, 9, 10, 11])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("random", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_any_chunks_give_the_values_of_one_pass(
    make_llm, expected, max_step_tokens, page_size, random
):
    llm = make_llm(max_step_tokens=max_step_tokens, page_size=page_size)
    (output,) = llm.generate(PROMPT, asking(**random))
    check(output.prompt_logprobs, expected)
    plain = SamplingParams(max_tokens=5, ignore_eos=True, **{"temperature": 0, **random})
    (without,) = make_llm().generate(PROMPT, plain)
    assert without.prompt_logprobs is None
    assert output.outputs == without.outputs, "asking changes nothing about the answer"


@pytest.mark.parametrize("asks", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("random", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("max_step_tokens", [1, 8, 64])
def test_prompts_that_share_a_budget(make_llm, tiny_model, asks, random, max_step_tokens):
    prompts = [PROMPT, OTHER]
    plain = SamplingParams(max_tokens=5, ignore_eos=True, **{"temperature": 0, **random})
    params = [asking(2, **random) if ask else plain for ask in asks]
    expected = [make_llm().generate(prompt, plain)[0].outputs for prompt in prompts]
    outputs = make_llm(max_step_tokens=max_step_tokens).generate(prompts, params)
    llm = make_llm(max_step_tokens=max_step_tokens)
    streams = [llm.stream(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    events = list(zip(*streams, strict=True))
    for place, (prompt, ask, output) in enumerate(zip(prompts, asks, outputs, strict=True)):
        assert output.outputs == expected[place]
        seen = [pair[place] for pair in events]
        assert [event.token_ids for event in seen] == [[t] for t in output.outputs[0].token_ids]
        if ask:
            check(output.prompt_logprobs, dense(tiny_model, prompt, 2))
            check(seen[0].prompt_logprobs, dense(tiny_model, prompt, 2))
        else:
            assert output.prompt_logprobs is None
            assert all(event.prompt_logprobs is None for event in seen)


@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_tokens_own_entry_comes_first_and_then_the_likeliest(make_llm, tiny_model, count):
    (output,) = make_llm().generate(PROMPT, asking(count))
    check(output.prompt_logprobs, dense(tiny_model, PROMPT, count))
    for token, entry in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True):
        assert next(iter(entry)) == token
        assert len(entry) in (count, count + 1)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("max_batch", [1, 8])
def test_samples_share_one_computation(make_llm, expected, monkeypatch, n, max_batch):
    llm = make_llm(max_batch=max_batch, max_step_tokens=4)
    rows = []
    record_rows(monkeypatch, llm, rows)
    (output,) = llm.generate(PROMPT, asking(n=n, temperature=1.0, seed=1))
    check(output.prompt_logprobs, expected)
    assert rows == list(range(9)), "each token is scored once"
    assert [sample.index for sample in output.outputs] == list(range(n))


def record_rows(monkeypatch, llm, rows):
    """Note the position of each token whose logits are computed for its prompt."""
    scheduler = llm._core.scheduler
    schedule = scheduler.schedule_prefill

    def recording(*arguments):
        batch = schedule(*arguments)
        for _, first, count in batch.scored if batch is not None else ():
            rows.extend(range(first, first + count))
        return batch

    monkeypatch.setattr(scheduler, "schedule_prefill", recording)


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_in_the_middle_of_the_prompt(
    make_llm, tiny_model, monkeypatch, prefix_caching, max_tokens
):
    """An older sequence takes the pages of one that has read half of its prompt."""
    llm = make_llm(num_pages=10, page_size=4, max_step_tokens=1, prefix_caching=prefix_caching)
    rows = []
    record_rows(monkeypatch, llm, rows)
    prompt = list(range(20, 48))
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    old = submit(llm, [7, 8], plain)
    young = submit(llm, prompt, asking(3, max_tokens))
    (sequence,) = young.sequences
    read_before = 0
    while not young.is_finished:
        if not sequence.num_preemptions:
            read_before = sequence.num_computed
        llm._core.step()
    assert sequence.num_preemptions == 1
    assert 4 < read_before < 27, "the test needs a prompt that was half read"
    assert old.is_finished
    output = young.output()
    check(output.prompt_logprobs, dense(tiny_model, prompt, 3))
    assert rows == list(range(27)), "nothing is scored twice"
    assert len(output.outputs[0].token_ids) == max_tokens


def submit(llm, prompt, params):
    return llm._submit(llm._reader.read("test", prompt, params), RequestOptions())


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_cached_prompt_is_computed_and_feeds_the_cache(make_llm, tiny_model, page_size):
    llm = make_llm(page_size=page_size)
    prompt = list(range(10, 42))
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (first,) = llm.generate(prompt, plain)
    (asked,) = llm.generate(prompt, asking(2))
    check(asked.prompt_logprobs, dense(tiny_model, prompt, 2))
    assert asked.metrics.cached_tokens == 0
    assert asked.outputs == first.outputs
    fresh = make_llm(page_size=page_size)
    fresh.generate(prompt, asking(2))
    (after,) = fresh.generate(prompt, plain)
    assert after.metrics.cached_tokens == 31 // page_size * page_size
    assert after.outputs == first.outputs


@pytest.mark.parametrize("rows", [1, 2, 5, 256])
def test_logits_are_computed_in_bounded_pieces(make_llm, tiny_model, expected, monkeypatch, rows):
    monkeypatch.setattr(executor, "PROMPT_LOGIT_ROWS", rows)
    sizes = []
    compute = type(tiny_model.model).compute_logits

    def recording(model, hidden):
        sizes.append(len(hidden))
        return compute(model, hidden)

    monkeypatch.setattr(type(tiny_model.model), "compute_logits", recording)
    outputs = make_llm(max_step_tokens=30).generate([PROMPT, OTHER], asking(max_tokens=1))
    monkeypatch.undo()
    check(outputs[0].prompt_logprobs, expected)
    check(outputs[1].prompt_logprobs, dense(tiny_model, OTHER, 3))
    assert max(sizes) <= max(rows, 2)
    assert sum(sizes) == 9 + 6 + 2


@pytest.mark.parametrize("max_step_tokens", [1, 4, 64])
@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_alone(make_llm, expected, max_step_tokens, n):
    """max_tokens 0: the prompt is computed and nothing is generated."""
    llm = make_llm(max_step_tokens=max_step_tokens)
    (output,) = llm.generate(PROMPT, asking(max_tokens=0, n=n))
    check(output.prompt_logprobs, expected)
    assert [sample.index for sample in output.outputs] == list(range(n))
    for sample in output.outputs:
        assert (sample.token_ids, sample.text, sample.finish_reason) == ([], "", "length")
    assert output.metrics.output_tokens == 0
    assert llm.stats().steps == -(-len(PROMPT) // max_step_tokens)


def test_prompts_alone_beside_others(make_llm, expected):
    llm = make_llm(max_step_tokens=4, max_batch=2)
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    params = [asking(max_tokens=0), plain, asking(max_tokens=0), asking()]
    outputs = llm.generate([PROMPT, OTHER, PROMPT, PROMPT], params)
    for place in (0, 2, 3):
        check(outputs[place].prompt_logprobs, expected)
    assert outputs[1].outputs == make_llm().generate(OTHER, plain)[0].outputs


def test_a_prompt_of_one_token_has_one_empty_entry(make_llm):
    for max_tokens in (0, 2):
        (output,) = make_llm().generate([5], asking(max_tokens=max_tokens, n=2))
        assert output.prompt_logprobs == [None]
        assert [len(sample.token_ids) for sample in output.outputs] == [max_tokens] * 2


@pytest.mark.parametrize("max_step_tokens", [1, 3, 4, 9, 10, 11])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_shows_them_once_with_its_first_event(make_llm, expected, max_step_tokens, n):
    llm = make_llm(max_step_tokens=max_step_tokens)
    for max_tokens in (0, 5):
        events = list(llm.stream(PROMPT, asking(max_tokens=max_tokens, n=n)))
        check(events[0].prompt_logprobs, expected)
        assert all(event.prompt_logprobs is None for event in events[1:])
        assert len(events) == n * max(max_tokens, 1)
        assert all(len(event.token_ids) == min(max_tokens, 1) for event in events)


def test_a_closed_stream_returns_its_pages(make_llm):
    llm = make_llm(max_step_tokens=3)
    events = llm.stream(PROMPT, asking(max_tokens=50))
    next(events)
    events.close()
    other = llm.stream(OTHER, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    next(other)
    half_read = llm.stream(PROMPT, asking(max_tokens=0))
    other.close()
    half_read.close()
    assert llm.stats().free_pages == llm.stats().num_pages


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_failed_step_is_run_again_without_doubling(make_llm, expected, monkeypatch, max_tokens):
    llm = make_llm(max_step_tokens=3)
    executor_ = llm._core._executor
    prefill = executor_.execute_prefill
    calls = []

    def failing_after_scores(batch, *rest):
        logits = prefill(batch, *rest)
        calls.append(batch)
        if len(calls) in (2, 4):
            raise RuntimeError("the forward pass failed")
        return logits

    monkeypatch.setattr(executor_, "execute_prefill", failing_after_scores)
    core = llm._core
    request = submit(llm, PROMPT, asking(max_tokens=max_tokens))
    failures = 0
    while not request.is_finished:
        try:
            core.step()
        except RuntimeError:
            failures += 1
    assert failures == 2
    check(request.output().prompt_logprobs, expected)
    assert len(request.output().outputs[0].token_ids) == max_tokens


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_prompt_logits_that_are_not_finite_end_the_request_alone(
    make_llm, tiny_model, monkeypatch, bad, max_tokens
):
    llm = make_llm()
    compute = type(tiny_model.model).compute_logits

    def broken(model, hidden):
        logits = compute(model, hidden)
        if len(logits) == 9:  # the prompt's
            logits[4, 7] = bad
        return logits

    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    neighbour = llm.stream(OTHER, plain)
    seen = [next(neighbour).token_ids]
    with monkeypatch.context() as patch:
        patch.setattr(type(tiny_model.model), "compute_logits", broken)
        with pytest.raises(
            RuntimeError, match="prompt 0: the model's logits are not finite after 5"
        ):
            llm.generate(PROMPT, asking(max_tokens=max_tokens, n=2))
    seen += [event.token_ids for event in neighbour]
    assert seen == [[token] for token in make_llm().generate(OTHER, plain)[0].outputs[0].token_ids]
