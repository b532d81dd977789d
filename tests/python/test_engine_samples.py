"""Several samples of one prompt: n of them, or with best_of the likeliest of more."""

from __future__ import annotations

import pytest
import torch

from astrai.sampling import SamplingParams


def params(**values):
    return SamplingParams(**{"seed": 7, "max_tokens": 12, **values})


def cumulative(tiny_model, prompt_ids, token_ids):
    """The sum of the tokens' log probabilities in one pass over the whole text."""
    model = tiny_model.model
    with torch.no_grad():
        logits = model.compute_logits(model(torch.tensor([prompt_ids + token_ids])))[0]
    logprobs = logits[:, : tiny_model.tokenizer.vocab_size].double().log_softmax(dim=1)
    first = len(prompt_ids) - 1
    return sum(float(logprobs[first + i, token]) for i, token in enumerate(token_ids))


def test_sample_counts_add_up(make_llm):
    settings = params(n=3, max_tokens=5, ignore_eos=True)
    (output,) = make_llm().generate("hello", settings)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert output.metrics.output_tokens == 15
    assert output.metrics.prompt_tokens == len(output.prompt_token_ids)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_samples_that_end_at_different_steps_are_all_there(make_llm, n):
    params = SamplingParams(
        n=n, temperature=1.0, seed=1, max_tokens=8, logit_bias={1: 9.0}, logprobs=0
    )
    llm = make_llm()
    (output,) = llm.generate("hello", params)
    assert [sample.index for sample in output.outputs] == list(range(n))
    assert n < 4 or len({len(sample.token_ids) for sample in output.outputs}) > 1
    assert all(sample.finish_reason in ("stop", "length") for sample in output.outputs)
    texts, reasons = [""] * n, [None] * n
    for event in llm.stream("hello", params):
        assert reasons[event.index] is None, "nothing follows a finish reason"
        texts[event.index] += event.text
        reasons[event.index] = event.finish_reason
    assert texts == [sample.text for sample in output.outputs]
    assert reasons == [sample.finish_reason for sample in output.outputs]
    assert output.metrics.prompt_tokens == len(output.prompt_token_ids)
    assert output.metrics.output_tokens == sum(len(s.token_ids) for s in output.outputs)


def test_samples_of_two_prompts_are_kept_apart(make_llm):
    params = [SamplingParams(n=2, seed=seed, max_tokens=8, logit_bias={1: 9.0}) for seed in (1, 2)]
    both = make_llm().generate(["hello", "world"], params)
    for prompt, own, output in zip(["hello", "world"], params, both, strict=True):
        assert [sample.index for sample in output.outputs] == [0, 1]
        assert output.outputs == make_llm().generate(prompt, own)[0].outputs
        assert output.metrics.prompt_tokens == len(output.prompt_token_ids)


def test_closing_a_stream_when_the_first_sample_has_ended(make_llm):
    llm = make_llm()
    params = SamplingParams(n=4, seed=1, max_tokens=40, logit_bias={1: 5.0})
    events = llm.stream("hello", params)
    while next(events).finish_reason is None:
        pass
    assert 0 < llm.stats().running < 4
    events.close()
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)
    assert llm.stats().free_pages == llm.stats().num_pages


# --- the best of several --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": 2}, {"temperature": 2.0, "top_p": 0.9}, {"logit_bias": {1: 9.0}}],
    ids=str,
)
def test_the_likeliest_samples_are_returned_best_first(make_llm, n, more):
    """With every sample's score at hand, the choice is a sort."""
    # Biased towards the end-of-sequence id, samples have different lengths.
    all_values = {**more, "n": 8, "logprobs": more.get("logprobs", 0)}
    (everything,) = make_llm().generate("hello", params(**all_values))
    ranked = sorted(everything.outputs, key=lambda sample: -sample.cumulative_logprob)
    (output,) = make_llm().generate("hello", params(**more, n=n, best_of=8))
    assert [sample.index for sample in output.outputs] == list(range(n))
    for sample, expected in zip(output.outputs, ranked, strict=False):
        assert sample.token_ids == expected.token_ids
        assert sample.text == expected.text
        assert sample.finish_reason == expected.finish_reason
        assert sample.cumulative_logprob == expected.cumulative_logprob
        assert sample.logprobs == (expected.logprobs if "logprobs" in more else None)
    scores = [sample.cumulative_logprob for sample in output.outputs]
    assert scores == sorted(scores, reverse=True)
    assert output.metrics.output_tokens == everything.metrics.output_tokens
    assert output.metrics.prompt_tokens == everything.metrics.prompt_tokens


def test_the_score_is_under_the_models_own_distribution(make_llm, tiny_model):
    values = {"temperature": 3.0, "repetition_penalty": 1.3, "top_k": 40, "ignore_eos": True}
    (output,) = make_llm().generate("hello", params(n=2, best_of=4, **values))
    for sample in output.outputs:
        expected = cumulative(tiny_model, output.prompt_token_ids, sample.token_ids)
        assert sample.cumulative_logprob == pytest.approx(expected, abs=1e-3)


def test_the_score_is_there_with_logprobs_and_not_without(make_llm):
    llm = make_llm()
    (sample,) = llm.generate("hello", params(logprobs=0))[0].outputs
    chosen = [step[token] for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(chosen))
    for values in ({}, {"n": 2, "best_of": 2}):
        for sample in llm.generate("hello", params(**values))[0].outputs:
            assert sample.cumulative_logprob is None
            assert sample.logprobs is None
    (sample,) = llm.generate("hello", params(logprobs=0, max_tokens=0))[0].outputs
    assert sample.cumulative_logprob == 0.0


def test_as_many_as_n_are_in_the_order_in_which_they_were_generated(make_llm):
    plain = make_llm().generate("hello", params(n=4, temperature=2.0))[0].outputs
    assert make_llm().generate("hello", params(n=4, best_of=4, temperature=2.0))[0].outputs == plain


def test_greedy_samples_are_equal(make_llm):
    (output,) = make_llm().generate("hello", params(temperature=0, n=2))
    assert output.outputs[0].token_ids == output.outputs[1].token_ids
    (output,) = make_llm().generate("hello", params(temperature=0, n=2, best_of=5))
    first, second = output.outputs
    assert first.token_ids == second.token_ids
    assert first.cumulative_logprob == second.cumulative_logprob


@pytest.mark.parametrize(
    "options",
    [{"num_pages": 7, "max_step_tokens": 3}, {"max_batch": 1}, {"prefix_caching": False}],
    ids=str,
)
def test_the_choice_does_not_depend_on_memory_or_batch(make_llm, options):
    values = params(n=2, best_of=5, max_tokens=40, ignore_eos=True)
    expected = make_llm().generate([[5, 6, 7], [8] * 20], values)
    outputs = make_llm(**options).generate([[5, 6, 7], [8] * 20], values)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.metrics.output_tokens == 200
        for sample, other in zip(output.outputs, reference.outputs, strict=True):
            assert sample.token_ids == other.token_ids
            assert sample.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
    if "num_pages" in options:
        assert sum(output.metrics.preemptions for output in outputs) > 0


def test_progress_counts_every_sample(make_llm):
    seen = []
    make_llm().generate(
        "hello", params(n=2, best_of=5), progress=lambda done, total: seen.append((done, total))
    )
    assert seen[0] == (0, 5)
    assert seen[-1] == (5, 5)


def test_streams_of_samples_that_are_chosen_later_are_refused(make_llm):
    llm = make_llm()
    with pytest.raises(ValueError, match=r"stream: best_of is 3 with n 2; expected best_of None"):
        llm.stream("hello", params(n=2, best_of=3))
    assert (llm.stats().waiting, llm.stats().steps) == (0, 0)
    events = list(llm.stream("hello", params(n=2, best_of=2)))
    assert {event.index for event in events} == {0, 1}


def test_prompt_and_choice_together(make_llm):
    (output,) = make_llm(max_step_tokens=2).generate(
        "hello world", params(n=1, best_of=3, prompt_logprobs=1)
    )
    (alone,) = make_llm().generate("hello world", params(prompt_logprobs=1, max_tokens=0))
    assert output.prompt_logprobs[0] is None
    for entry, expected in zip(output.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        assert entry == pytest.approx(expected, abs=1e-4)
