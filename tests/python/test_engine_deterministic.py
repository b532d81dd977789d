"""deterministic=True: the bits of an answer depend on its own tokens alone."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from astrai import LLM
from astrai.attention import attn_backend
from astrai.sampling import SamplingParams
from engine_fuzz import MAX_CONTEXT, make_scenario, run_scenario

PLAIN = {
    "page_size": 16,
    "num_pages": 64,
    "max_batch": 16,
    "max_step_tokens": 4096,
    "max_context": MAX_CONTEXT,
    "prefix_caching": False,
}


@pytest.fixture(params=["float32", "bfloat16"])
def model(request, tiny_model):
    """The tiny model in each dtype."""
    if request.param == "float32":
        return tiny_model
    twin = type(tiny_model.model)(tiny_model.config)
    twin.load_state_dict(tiny_model.model.state_dict())
    return dataclasses.replace(tiny_model, model=twin.to(torch.bfloat16).eval())


def with_logprobs(scenario):
    """Every choice and its surroundings are compared: log probabilities show the logits' bits."""
    arrivals = [
        dataclasses.replace(
            arrival, params=dataclasses.replace(arrival.params, logprobs=3), abort_after=None
        )
        for arrival in scenario.arrivals
    ]
    return dataclasses.replace(scenario, arrivals=arrivals)


@pytest.mark.parametrize("seed", range(3000, 3030))
def test_batch_order_chunks_pages_prefixes_and_preemption_show_in_no_bit(model, seed):
    scenario = with_logprobs(make_scenario(seed, model.tokenizer.vocab_size))
    busy = dataclasses.replace(scenario, options={**scenario.options, "deterministic": True})
    found = [answer for _, answer in run_scenario(model, busy)]
    rng = random.Random(seed)
    with LLM(model, **PLAIN, deterministic=True) as llm:
        places = list(range(len(scenario.arrivals)))
        rng.shuffle(places)
        for place in places:
            answer = found[place]
            if answer.was_refused:
                continue
            arrival = scenario.arrivals[place]
            (output,) = llm.generate([arrival.prompt_ids], arrival.params)
            where = f"seed {seed}, request {place}"
            assert answer.prompt_logprobs in (None, output.prompt_logprobs), where
            alone = {(tuple(s.token_ids), s.text): s.logprobs for s in output.outputs}
            mine = {(tuple(s.token_ids), s.text): s.logprobs for s in answer.samples}
            # Of ranked samples the fuzzer keeps those that were not returned, too.
            assert {key: mine.get(key) for key in alone} == alone, where
            if arrival.params.best_of is None:
                assert len(mine) == len(alone), where


def test_without_it_a_recomputed_token_shows_in_the_bits(tiny_model):
    """What the option is for; were this to hold anyway, the test above would prove little."""
    prompt = list(range(5, 40))
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)

    def continued(deterministic):
        options = {**PLAIN, "deterministic": deterministic}
        with LLM(tiny_model, **options) as llm:
            (whole,) = llm.generate([prompt], params)
            said = whole.outputs[0].token_ids
            rest = dataclasses.replace(params, max_tokens=4)
            (again,) = llm.generate([prompt + said[:4]], rest)
        return whole.outputs[0].logprobs[4:], again.outputs[0].logprobs

    decoded, read = continued(deterministic=True)
    assert decoded == read
    decoded, read = continued(deterministic=False)
    assert decoded != read


def test_a_backend_that_cannot_promise_it_is_refused(tiny_model):
    expected = "deterministic with attention backend torch_native on cpu; expected backend cpu"
    with pytest.raises(ValueError, match=expected):
        LLM(tiny_model, deterministic=True, attn_backend="torch_native")
    with attn_backend("torch_native"), pytest.raises(ValueError, match=expected):
        LLM(tiny_model, deterministic=True)
    with pytest.raises(TypeError, match="deterministic 1; expected True or False"):
        LLM(tiny_model, deterministic=1)
