"""LLM: what goes in, what comes out, and what is refused before anything is queued."""

from __future__ import annotations

import dataclasses
import os
import signal
import weakref

import pytest
import torch

from astrai import LLM
from astrai.sampling import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]


def greedy(max_tokens=12, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def dense_greedy(model, prompt_ids, count, vocab_size):
    """Tokens and logprobs by running the whole text through the model anew for each token."""
    ids, logprobs = list(prompt_ids), []
    for _ in range(count):
        with torch.no_grad():
            logits = model.compute_logits(model(torch.tensor([ids])))[0, -1, :vocab_size]
        ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(0)[ids[-1]]))
    return ids[len(prompt_ids) :], logprobs


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["hello world", "é", [5, 6, 7]], ids=str)
@pytest.mark.parametrize("backend", [None, "torch_native"])
def test_greedy_text_is_that_of_dense_attention(tiny_model, make_llm, prompt, backend):
    llm = make_llm(attn_backend=backend)
    (output,) = llm.generate(prompt, greedy(24, ignore_eos=True, logprobs=0))
    expected, logprobs = dense_greedy(
        tiny_model.model, output.prompt_token_ids, 24, tiny_model.tokenizer.vocab_size
    )
    (sample,) = output.outputs
    assert sample.token_ids == expected
    assert sample.text == tiny_model.tokenizer.decode(expected)
    got = [step[token] for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert got == pytest.approx(logprobs, abs=1e-4)


def test_output_of_a_text(make_llm, tiny_model):
    (output,) = make_llm().generate("hello", greedy())
    assert output.prompt == "hello"
    assert output.prompt_token_ids == tiny_model.tokenizer.encode("hello")
    (sample,) = output.outputs
    assert sample.index == 0
    assert sample.logprobs is None
    metrics = output.metrics
    assert metrics.prompt_tokens == len(output.prompt_token_ids)
    assert metrics.output_tokens == len(sample.token_ids)
    assert metrics.time_to_first_token_s > 0
    assert metrics.decode_tokens_per_s > 0
    assert metrics.preemptions == 0


def test_prompts_of_all_kinds_in_one_call(make_llm):
    llm = make_llm()
    outputs = llm.generate(["hello", [5, 6, 7]], [greedy(3), greedy(5)])
    assert [output.prompt for output in outputs] == ["hello", None]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    assert len(llm.generate([5, 6, 7], greedy(2))) == 1
    assert len(llm.generate([[5, 6], [7]], greedy(2))) == 2


def test_chat_renders_the_template(make_llm, tiny_model):
    llm = make_llm()
    output = llm.chat(HELLO, greedy(4))
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids[0] == tiny_model.tokenizer.token_to_id("<|im_start|>")
    both = llm.chat([HELLO, HELLO], greedy(4))
    assert [item.outputs[0].token_ids for item in both] == [output.outputs[0].token_ids] * 2


def test_progress_is_reported(make_llm):
    seen = []
    make_llm().generate(
        ["a", "b"],
        [greedy(2), greedy(6, n=2)],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[0] == (0, 3)
    assert seen[-1] == (3, 3)
    assert seen == sorted(set(seen))


# --- how a request ends ---------------------------------------------------------------------------


def test_eos_ends_a_request_and_counts(make_llm):
    params = greedy(logit_bias={1: 100.0})
    (sample,) = make_llm().generate("hello", params)[0].outputs
    assert (sample.token_ids, sample.text) == ([1], "")
    assert (sample.finish_reason, sample.stop_reason) == ("stop", 1)
    ignoring = make_llm().generate("hello", greedy(4, logit_bias={1: 100.0}, ignore_eos=True))
    assert ignoring[0].outputs[0].token_ids == [1] * 4
    assert ignoring[0].outputs[0].finish_reason == "length"


def test_min_tokens_holds_eos_back(make_llm):
    params = greedy(9, logit_bias={1: 100.0}, min_tokens=5)
    (sample,) = make_llm().generate("hello", params)[0].outputs
    assert len(sample.token_ids) == 6
    assert 1 not in sample.token_ids[:5]
    assert sample.token_ids[5] == 1


def test_eos_ids_outside_the_vocabulary_are_ignored_with_a_warning(tiny_model, caplog):
    config = dataclasses.replace(tiny_model.config, eos_token_ids=(1, 280))
    model = dataclasses.replace(tiny_model, config=config)
    with LLM(model) as llm:
        assert "end-of-sequence ids [280] are ignored" in caplog.text
        sample = llm.generate("hello", greedy(5, min_tokens=5))[0].outputs[0]
    assert len(sample.token_ids) == 5


def test_stop_id_ends_a_request(make_llm):
    free = make_llm().generate("hello", greedy(ignore_eos=True))[0].outputs[0]
    stop_id = free.token_ids[4]
    end = free.token_ids.index(stop_id)
    stopped = make_llm().generate("hello", greedy(stop_token_ids=(stop_id,), ignore_eos=True))
    (sample,) = stopped[0].outputs
    assert sample.token_ids == free.token_ids[: end + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop_id)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("exactly_at_the_limit", [False, True])
def test_stop_string_ends_the_text(make_llm, tiny_model, include, exactly_at_the_limit):
    # Letters by bias, so that the text is text.
    bias = {tiny_model.tokenizer.encode(c)[0]: 100.0 for c in "abcdefgh"}
    free = make_llm().generate("hello", greedy(24, logit_bias=bias))[0].outputs[0]
    stop = free.text[10:14]
    start = free.text.index(stop)
    limit = start + len(stop) if exactly_at_the_limit else 24
    params = greedy(limit, logit_bias=bias, stop=stop, include_stop_str_in_output=include)
    llm = make_llm()
    (sample,) = llm.generate("hello", params)[0].outputs
    assert sample.text == free.text[: start + (len(stop) if include else 0)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert sample.token_ids == free.token_ids[: start + len(stop)]
    events = list(llm.stream("hello", params))
    assert "".join(event.text for event in events) == sample.text
    assert sum(len(event.token_ids) for event in events) == len(sample.token_ids)
    assert events[-1].finish_reason == "stop"


def test_stop_string_that_spells_a_hidden_token_stops_at_it(make_llm, tiny_model):
    end = tiny_model.tokenizer.token_to_id("<|im_end|>")
    params = greedy(6, logit_bias={end: 100.0}, stop="<|im_end|>")
    (sample,) = make_llm().generate("hello", params)[0].outputs
    assert (sample.token_ids, sample.text, sample.finish_reason) == ([end], "", "stop")


def test_output_is_cut_at_the_end_of_the_context(make_llm):
    llm = make_llm(max_context=20)
    for max_tokens in (None, 1000, 15):
        (sample,) = llm.generate([5] * 5, greedy(max_tokens, ignore_eos=True))[0].outputs
        assert len(sample.token_ids) == 15
        assert sample.finish_reason == "length"
    (sample,) = llm.generate([5] * 19, greedy(None, ignore_eos=True))[0].outputs
    assert len(sample.token_ids) == 1


def test_nothing_is_generated_for_zero_tokens(make_llm):
    llm = make_llm()
    (sample,) = llm.generate("hello", greedy(0))[0].outputs
    assert (sample.token_ids, sample.text, sample.finish_reason) == ([], "", "length")
    (event,) = llm.stream("hello", greedy(0))
    assert (event.token_ids, event.text, event.finish_reason) == ([], "", "length")


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_step_tokens", [1, 3, 4, 9, 10, 11])
def test_stream_has_one_event_for_each_token(make_llm, max_step_tokens):
    llm = make_llm(max_step_tokens=max_step_tokens)
    for params in (
        greedy(5, ignore_eos=True),
        SamplingParams(seed=3, max_tokens=5, ignore_eos=True),
    ):
        events = list(llm.stream(list(range(20, 30)), params))
        assert [len(event.token_ids) for event in events] == [1] * 5
        assert all(event.token_ids[0] >= 0 for event in events)
        expected = make_llm().generate(list(range(20, 30)), params)[0].outputs[0]
        assert [event.token_ids[0] for event in events] == expected.token_ids
        assert "".join(event.text for event in events) == expected.text


def test_streamed_characters_are_whole(make_llm, tiny_model):
    """Random bytes of multi-byte characters: no event shows half of one."""
    ids = tiny_model.tokenizer.encode("é€🙂", add_special_tokens=False)
    bias = dict.fromkeys(ids, 60.0)
    params = SamplingParams(seed=2, max_tokens=60, logit_bias=bias, temperature=2.0)
    llm = make_llm()
    pieces = [event.text for event in llm.stream("hello", params)]
    (sample,) = llm.generate("hello", params)[0].outputs
    assert "".join(pieces) == sample.text == tiny_model.tokenizer.decode(sample.token_ids)


def test_closing_a_stream_returns_its_pages(make_llm):
    llm = make_llm()
    events = llm.stream(HELLO, greedy(50, ignore_eos=True, n=3))
    for _ in range(5):
        next(events)
    assert llm.stats().running == 3
    events.close()
    assert llm.stats().running == 0
    assert llm.stats().free_pages == llm.stats().num_pages


def test_stream_that_never_began_holds_nothing(make_llm):
    llm = make_llm()
    events = llm.stream("hello", greedy())
    assert not llm.stats().waiting
    events.close()


def test_generate_while_a_stream_is_open(make_llm):
    llm = make_llm()
    expected = [event.token_ids for event in llm.stream("hello", greedy(30, ignore_eos=True))]
    events = llm.stream("hello", greedy(30, ignore_eos=True))
    seen = [next(events).token_ids for _ in range(3)]
    llm.generate("world", greedy(6))
    seen += [event.token_ids for event in events]
    assert seen == expected


# --- failures -------------------------------------------------------------------------------------


def fail_at(monkeypatch, llm, step, error):
    """Make the executor raise at its `step`-th call from now on."""
    executor = llm._core._executor
    calls = {"count": 0}

    def wrap(run):
        def wrapped(batch):
            calls["count"] += 1
            if calls["count"] == step:
                raise error("the forward pass failed")
            return run(batch)

        return wrapped

    monkeypatch.setattr(executor, "execute_prefill", wrap(executor.execute_prefill))
    monkeypatch.setattr(executor, "execute_decode", wrap(executor.execute_decode))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_failure_returns_pages_and_leaves_streams_alone(make_llm, monkeypatch, error, step):
    llm = make_llm(max_step_tokens=8)
    expected = [event.token_ids for event in llm.stream("hello", greedy(30, ignore_eos=True))]
    events = llm.stream("hello", greedy(30, ignore_eos=True))
    seen = [next(events).token_ids for _ in range(3)]
    with monkeypatch.context() as patch:
        fail_at(patch, llm, step, error)
        with pytest.raises(error):
            llm.generate(["world", [5] * 30], greedy(12, ignore_eos=True))
    assert llm.stats().running == 1
    llm.kv_cache.pool.check_integrity()
    seen += [event.token_ids for event in events]
    assert seen == expected


def test_failure_in_the_progress_callback_returns_pages(make_llm):
    def progress(done, total):
        if done:
            raise ZeroDivisionError

    llm = make_llm()
    with pytest.raises(ZeroDivisionError):
        llm.generate(["a", "b"], [greedy(2), greedy(50, ignore_eos=True)], progress=progress)
    assert llm.stats().running == 0


def test_interrupt_waits_for_the_end_of_the_step(make_llm, monkeypatch):
    llm = make_llm()
    executor = llm._core._executor
    decode = executor.execute_decode
    finished = []

    def interrupted(batch):
        if len(finished) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        logits = decode(batch)
        finished.append(1)
        return logits

    monkeypatch.setattr(executor, "execute_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", greedy(50, ignore_eos=True))
    assert len(finished) == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_an_error(make_llm, monkeypatch, temperature):
    llm = make_llm()
    executor = llm._core._executor
    decode = executor.execute_decode

    def broken(batch):
        logits = decode(batch).clone()
        logits[0] = float("nan")
        return logits

    params = SamplingParams(temperature=temperature, seed=1, max_tokens=8, ignore_eos=True)
    monkeypatch.setattr(executor, "execute_decode", broken)
    with pytest.raises(
        RuntimeError, match=r"generate: prompt 0: the model's logits are not finite"
    ):
        llm.generate(["hello", "world"], params)
    with pytest.raises(RuntimeError, match=r"stream: .*not finite"):
        list(llm.stream("hello", params))


def test_closing_lets_go_of_cache_and_model(make_llm):
    llm = make_llm()
    llm.generate("hello", greedy(2))
    storage = weakref.ref(llm.kv_cache.storage)
    executor = weakref.ref(llm._core._executor)
    llm.close()
    assert storage() is None
    assert executor() is None
    with pytest.raises(RuntimeError, match="closed"):
        llm.kv_cache  # noqa: B018


def test_closed_engine_refuses_work(make_llm):
    llm = make_llm()
    events = llm.stream("hello", greedy(50, ignore_eos=True))
    next(events)
    with llm:
        pass
    llm.close()
    assert llm.stats().free_pages == llm.stats().num_pages
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")
    with pytest.raises(RuntimeError, match="closed"):
        llm.stream("hello")
    assert [event.finish_reason for event in events][-1] == "abort"


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", ValueError, "prompt 0 is empty; expected at least one token"),
        ([], ValueError, "prompts is empty"),
        (["a", ""], ValueError, "prompt 1 is empty"),
        ([[5], []], ValueError, "prompt 1 is empty"),
        (7, TypeError, "prompts is int"),
        ([1.5], TypeError, "prompt 0 is float"),
        ([["a"]], TypeError, "has 'a'; expected token ids"),
        ([267], ValueError, r"token id 267; expected ids in \[0, 267\)"),
        ([-1], ValueError, "token id -1"),
        ([[5], [5] * 256], ValueError, r"prompt 1 has 256 tokens.*257; expected at most.*256"),
    ],
    ids=str,
)
def test_unusable_prompts_are_refused_before_any_is_queued(make_llm, prompts, error, message):
    llm = make_llm()
    with pytest.raises(error, match=message):
        llm.generate(prompts)
    assert (llm.stats().waiting, llm.stats().steps) == (0, 0)


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {267: 5.0}}, {"logit_bias": {300: 5.0}}, {"stop_token_ids": (267,)}],
    ids=str,
)
def test_ids_beyond_the_vocabulary_are_refused(make_llm, params):
    llm = make_llm()
    with pytest.raises(ValueError, match=r"has id \d+; expected ids in \[0, 267\)"):
        llm.generate("hello", SamplingParams(**params))
    assert llm.generate("hello", greedy(2))[0].outputs[0].token_ids


def test_padded_rows_of_the_head_are_never_chosen(make_llm, tiny_model, monkeypatch):
    llm = make_llm()
    executor = llm._core._executor
    decode = executor.execute_decode

    def padded(batch):
        logits = decode(batch).clone()
        logits[:, 280] = 1e4
        return logits

    monkeypatch.setattr(executor, "execute_decode", padded)
    for temperature in (0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
        assert max(llm.generate("hello", params)[0].outputs[0].token_ids) < 267


def test_request_that_can_never_fit_names_the_pages(make_llm):
    llm = make_llm(num_pages=4, page_size=4)
    with pytest.raises(ValueError, match=r"10 tokens and may generate 8, 5 pages.*the pool's 4"):
        llm.generate([5] * 10, greedy(8))
    with pytest.raises(ValueError, match=r"17 tokens, 5 pages of 4; expected at most the pool's 4"):
        llm.generate([5] * 17, greedy(1))
    # The last token is never stored: 10 + 7 - 1 tokens fill 4 pages exactly.
    for max_tokens in (7, None):
        (sample,) = llm.generate([5] * 10, greedy(max_tokens, ignore_eos=True))[0].outputs
        assert len(sample.token_ids) == 7


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"temperature": 0}, TypeError, "sampling_params is"),
        ([SamplingParams()], ValueError, "1 entries; expected one for each of the 2 prompts"),
        ([SamplingParams(), None], TypeError, "sampling_params is"),
    ],
    ids=["dict", "too few", "none inside"],
)
def test_wrong_params_are_refused(make_llm, params, error, message):
    with pytest.raises(error, match=message):
        make_llm().generate(["a", "b"], params)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], ValueError),
        ([{"content": "x"}], ValueError),
        ([{"role": "user"}], ValueError),
        ([HELLO, []], TypeError),
        (["hello"], TypeError),
    ],
    ids=str,
)
def test_unusable_conversations_are_refused(make_llm, messages, error):
    with pytest.raises(error, match=r"chat"):
        make_llm().chat(messages)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_batch": 0}, ValueError, "max_batch"),
        ({"page_size": 0}, ValueError, "page_size"),
        ({"num_pages": -1}, ValueError, "num_pages"),
        ({"max_step_tokens": 0}, ValueError, "max_step_tokens"),
        ({"max_context": 257}, ValueError, "max_context 257; expected at most the model's 256"),
        ({"max_batch": "8"}, TypeError, "max_batch"),
        ({"attn_backend": "nothing"}, ValueError, "nothing"),
        ({"attn_backend": "cuda"}, (ValueError, RuntimeError), "cuda"),
        ({"device": "cuda"}, ValueError, "cuda"),
        ({"dtype": "bfloat16"}, ValueError, "bfloat16"),
    ],
    ids=str,
)
def test_unusable_options_are_refused(tiny_model, options, error, message):
    with pytest.raises(error, match=message):
        LLM(tiny_model, **options)


def test_unknown_model_is_named():
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        LLM("no-such-model")


def test_matching_options_of_a_loaded_model_are_accepted(tiny_model):
    with LLM(tiny_model, device="cpu", dtype="float32", num_pages=4) as llm:
        assert llm.max_context == 256
        assert llm.config is tiny_model.config
        assert llm.tokenizer is tiny_model.tokenizer
