"""Bad words and allowed ids through the engine: ids, refusals, requests that run dry."""

from __future__ import annotations

import dataclasses

import pytest

from astrai.engine.bans import bad_word_ids, check_some_token_is_left
from astrai.sampling import SamplingParams

LETTERS = "abcdefgh"


def lettered(tiny_model, **params):
    """Parameters that spell letters, so that words come about."""
    ids = [tiny_model.tokenizer.encode(letter)[0] for letter in LETTERS]
    values = {"seed": 5, "max_tokens": 60, "allowed_token_ids": ids, **params}
    return SamplingParams(**values)


def text_of(llm, params, prompt="hello"):
    return llm.generate(prompt, params)[0].outputs[0].text


# --- bad words ------------------------------------------------------------------------------------


def test_words_are_taken_with_and_without_a_space(tiny_model):
    def ids(*words):
        return bad_word_ids("test", words, tiny_model.tokenizer, 267)

    encode = tiny_model.tokenizer.encode
    assert ids("hello") == (tuple(encode("hello")), tuple(encode(" hello")))
    assert len(encode("hello")) == 1
    # "w" has a token of its own with a space before it.
    assert ids("w") == ids(" w") == ids("   w") == ((encode("w")[0],), (encode(" w")[0],))
    assert ids(" ") == ((encode(" ")[0],),)
    assert ids("w", "w") == ids("w")
    assert ids("<eos>") == ((1,), (encode(" ")[0], 1))
    assert bad_word_ids("test", ["hello"], tiny_model.tokenizer, encode("hello")[0]) == ()


def test_a_word_without_tokens_is_refused(tiny_model):
    class Deaf:
        def encode(self, text, add_special_tokens=True):
            return []

    with pytest.raises(ValueError, match=r"prompt 3: bad_words has 'x', which has no tokens"):
        bad_word_ids("prompt 3", ["x"], Deaf(), 10)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_bad_words_do_not_appear(make_llm, tiny_model, temperature):
    llm = make_llm()
    free = text_of(llm, lettered(tiny_model, temperature=temperature))
    words = [free[1], free[3:5], free[6:9], free[10:14]]
    text = text_of(llm, lettered(tiny_model, temperature=temperature, bad_words=words))
    assert len(text) == 60
    for word in words:
        assert word in free
        assert word not in text


def test_what_comes_before_a_bad_word_stays_as_it_was(make_llm, tiny_model):
    llm = make_llm()
    free = text_of(llm, lettered(tiny_model))
    word = free[20:24]
    start = free.index(word)
    text = text_of(llm, lettered(tiny_model, bad_words=[word]))
    assert text[: start + 3] == free[: start + 3]
    assert text[start + 3] != free[start + 3]


def test_a_word_that_the_prompt_begins_may_be_completed(make_llm, tiny_model):
    llm = make_llm()
    encode = tiny_model.tokenizer.encode
    prompt = encode("ab")
    params = lettered(tiny_model, temperature=0, max_tokens=1, logit_bias={encode("c")[0]: 100.0})
    params = dataclasses.replace(params, bad_words=("abc",))
    assert text_of(llm, params, prompt) == "c"


def test_bad_words_hold_after_preemption_and_in_chunks(make_llm, tiny_model):
    prompts = [[9 + i, 20, 30] for i in range(4)]
    params = lettered(tiny_model, bad_words=["ab", "cc", "deg", "h"], max_tokens=40)
    expected = [output.outputs[0].text for output in make_llm().generate(prompts, params)]
    llm = make_llm(num_pages=7, max_step_tokens=2)
    outputs = llm.generate(prompts, params)
    assert llm.stats().preemptions > 0
    assert [output.outputs[0].text for output in outputs] == expected
    assert not any(word in text for text in expected for word in params.bad_words)


# --- allowed ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {},
        {"top_k": 3, "top_p": 0.9},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "min_p": 0.01},
        {"logit_bias": {200: 100.0, 1: 100.0}},
    ],
    ids=str,
)
def test_only_allowed_ids_appear(make_llm, params):
    allowed = (20, 40, 41, 90)
    settings = SamplingParams(seed=1, max_tokens=30, allowed_token_ids=allowed, **params)
    (sample,) = make_llm().generate("hello", settings)[0].outputs
    assert len(sample.token_ids) == 30, "no end-of-sequence id is allowed"
    assert set(sample.token_ids) <= set(allowed)


def test_stop_ids_end_a_request_only_where_they_are_allowed(make_llm):
    bias = {1: 100.0, 50: 90.0}
    base = {"temperature": 0, "max_tokens": 4, "logit_bias": bias, "stop_token_ids": (50,)}
    for allowed, tokens in [((20, 1), [1]), ((20, 50), [50]), ((20,), [20] * 4)]:
        params = SamplingParams(allowed_token_ids=allowed, **base)
        (sample,) = make_llm().generate("hello", params)[0].outputs
        assert sample.token_ids == tokens
    params = SamplingParams(allowed_token_ids=(20, 1), min_tokens=2, **base)
    (sample,) = make_llm().generate("hello", params)[0].outputs
    assert sample.token_ids == [20, 20, 1]


def test_allowed_ids_beyond_the_vocabulary_are_refused(make_llm):
    with pytest.raises(ValueError, match=r"allowed_token_ids has id 267; expected ids in \[0, 267"):
        make_llm().generate("hello", SamplingParams(allowed_token_ids=(5, 267)))


# --- nothing is left ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [1], "min_tokens": 1}, r"leave only stop ids.*min_tokens \(1\)"),
        (
            {"allowed_token_ids": [50], "stop_token_ids": [50], "min_tokens": 3},
            r"leave only stop ids.*min_tokens \(3\)",
        ),
        ({"allowed_token_ids": "w", "bad_words": "w"}, "rule out every token; expected at least"),
    ],
    ids=["eos", "stop id", "words"],
)
def test_parameters_that_leave_nothing_are_refused(make_llm, tiny_model, params, message):
    if params["allowed_token_ids"] == "w":
        encode = tiny_model.tokenizer.encode
        params = {**params, "allowed_token_ids": encode("w") + encode(" w")}
    llm = make_llm()
    with pytest.raises(ValueError, match=f"generate: prompt 1: .*{message}"):
        llm.generate(["hello", "hello"], [SamplingParams(max_tokens=2), SamplingParams(**params)])
    with pytest.raises(ValueError, match=f"stream: prompt: .*{message}"):
        llm.stream("hello", SamplingParams(**params))
    assert (llm.stats().waiting, llm.stats().steps) == (0, 0)


def test_a_vocabulary_of_bad_words_is_refused():
    words = tuple((token_id,) for token_id in range(5))
    check_some_token_is_left("test", SamplingParams(), words[:4], (), 5)
    check_some_token_is_left("test", SamplingParams(min_tokens=1), words[:3], (3,), 5)
    check_some_token_is_left("test", SamplingParams(), (*words[:4], (4, 4)), (), 5)
    with pytest.raises(ValueError, match="rule out every token"):
        check_some_token_is_left("test", SamplingParams(), words, (), 5)
    with pytest.raises(ValueError, match="leave only stop ids"):
        check_some_token_is_left("test", SamplingParams(min_tokens=1), words[:4], (4,), 5)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_a_request_that_runs_dry_ends_alone(make_llm, tiny_model, temperature, filters):
    """Only "a" and "b" are allowed, and nothing may follow them."""
    encode = tiny_model.tokenizer.encode
    dry = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=9,
        allowed_token_ids=[encode("a")[0], encode("b")[0]],
        bad_words=["aa", "ab", "ba", "bb"],
        **filters,
    )
    plain = SamplingParams(temperature=temperature, seed=2, max_tokens=9, ignore_eos=True)
    llm = make_llm()
    expected = [event.token_ids for event in llm.stream("world", plain)]
    neighbour = llm.stream("world", plain)
    seen = [next(neighbour).token_ids]
    num_tokens = len(encode("hello")) + 1
    message = (
        rf"prompt 0: the sampling parameters rule out every token after {num_tokens} tokens "
        r"\(allowed_token_ids, bad_words, min_tokens, structured\); expected at least one"
    )
    with pytest.raises(RuntimeError, match=f"generate: {message}"):
        llm.generate(["hello", "world"], [dry, plain])
    with pytest.raises(RuntimeError, match=f"stream: {message}"):
        list(llm.stream("hello", dry))
    seen += [event.token_ids for event in neighbour]
    assert seen == expected


def test_the_stream_of_a_request_that_runs_dry_ends_with_its_reason(make_llm, tiny_model):
    letter = tiny_model.tokenizer.encode("a")[0]
    dry = SamplingParams(max_tokens=9, allowed_token_ids=[letter], bad_words=["aaa"])
    stream = make_llm().stream("hello", dry)
    events = [next(stream) for _ in range(3)]
    with pytest.raises(RuntimeError, match="rule out every token"):
        next(stream)
    assert "".join(event.text for event in events) == "aa"
    assert [event.finish_reason for event in events] == [None, None, "error"]
