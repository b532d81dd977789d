"""AsyncLLM gives what LLM gives, to many at once, and lets go of whoever walks away."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import threading

import pytest

from astrai import LLM, AsyncLLM
from astrai.engine import EngineBusyError
from astrai.sampling import SamplingParams
from engine_checks import HANG, Gate, until_empty, until_queued

HELLO = [{"role": "user", "content": "hello"}]


def greedy(max_tokens=12, **params):
    params.setdefault("ignore_eos", True)
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def random_request(rng):
    """A prompt and parameters whose output depends on nothing else."""
    prompt = [rng.randrange(4, 267) for _ in range(rng.randint(1, 30))]
    if rng.random() < 0.3:
        prompt = "".join(rng.choices("hello world", k=rng.randint(1, 20)))
    params = SamplingParams(
        temperature=rng.choice((0, 0.8, 1.0)),
        seed=rng.randrange(2**31),
        n=rng.choice((1, 1, 1, 3)),
        max_tokens=rng.randint(0, 20),
        stop=rng.choice(((), "e", ("o", "th"))),
        frequency_penalty=rng.choice((0.0, 0.0, 0.7)),
    )
    return prompt, params


async def read(events):
    """The samples of a stream: index -> (text, ids, finish reason)."""
    samples = {}
    async for event in events:
        text, ids, reason = samples.get(event.index, ("", [], None))
        assert reason is None, "nothing follows a finish reason"
        samples[event.index] = (text + event.text, ids + event.token_ids, event.finish_reason)
    return samples


def samples_of(output):
    return {s.index: (s.text, s.token_ids, s.finish_reason) for s in output.outputs}


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_pages": 12, "page_size": 8, "max_step_tokens": 7, "max_batch": 5},
        {"prefix_caching": False, "max_step_tokens": 16},
    ],
    ids=["roomy", "tight", "uncached"],
)
def test_many_at_once_give_what_llm_gives(make_llm, make_async, options):
    rng = random.Random(5)
    requests = [random_request(rng) for _ in range(40)]
    expected = [make_llm().generate([p], s)[0] for p, s in requests]

    async def main():
        async with make_async(**options) as llm:
            outputs = asyncio.gather(*[llm.generate(p, s) for p, s in requests])
            streams = asyncio.gather(*[read(llm.stream(p, s)) for p, s in requests])
            return await outputs, await streams

    outputs, streams = asyncio.run(main())
    for output, stream, reference in zip(outputs, streams, expected, strict=True):
        assert output.outputs == reference.outputs
        assert (output.prompt, output.prompt_token_ids) == (
            reference.prompt,
            reference.prompt_token_ids,
        )
        assert output.metrics.output_tokens == reference.metrics.output_tokens
        assert stream == samples_of(reference)


def test_chat_and_streamed_chat(make_llm, make_async):
    expected = make_llm().chat(HELLO, greedy(logprobs=2), template_values={"x": 1})

    async def main():
        async with make_async() as llm:
            answer = await llm.chat(HELLO, greedy(logprobs=2), template_values={"x": 1})
            streamed = await read(llm.stream(HELLO, greedy(logprobs=2), template_values={"x": 1}))
            return answer, streamed

    answer, streamed = asyncio.run(main())
    assert answer.prompt == expected.prompt
    assert answer.outputs == expected.outputs
    assert streamed == samples_of(expected)


@pytest.mark.parametrize("max_step_tokens", [4, 64])
def test_ends_without_a_token_are_reported(make_llm, make_async, max_step_tokens):
    """Prompts that are only to be scored."""
    scored = SamplingParams(max_tokens=0, prompt_logprobs=2)
    prompt = list(range(10, 30))
    (expected,) = make_llm().generate([prompt], scored)

    async def main():
        async with make_async(max_step_tokens=max_step_tokens) as llm:
            output = await asyncio.wait_for(llm.generate(prompt, scored), HANG)
            streamed = await asyncio.wait_for(read(llm.stream(prompt, scored)), HANG)
            best = await asyncio.wait_for(llm.generate(prompt, greedy(best_of=3)), HANG)
            with pytest.raises(ValueError, match="best_of"):
                llm.stream(prompt, greedy(best_of=3))
            return output, streamed, best

    output, streamed, best = asyncio.run(main())
    assert output.outputs == expected.outputs
    assert len(output.prompt_logprobs) == len(prompt)
    for mine, other in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
    assert streamed == samples_of(expected)
    assert len(best.outputs) == 1


def test_engine_seed_counts_in_the_order_of_the_calls(make_llm, make_async):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = ["hello " * (12 - i) for i in range(12)]  # the first are prepared last
    expected = make_llm(seed=9).generate(prompts, params)

    async def main():
        async with make_async(seed=9) as llm:
            return await asyncio.gather(*[llm.generate(prompt, params) for prompt in prompts])

    assert [o.outputs for o in asyncio.run(main())] == [o.outputs for o in expected]


def test_defaults_and_facts_are_those_of_llm(make_llm, make_async):
    reference = make_llm(max_context=100)

    async def main():
        async with make_async(max_context=100) as llm:
            for name in ("tokenizer", "config", "max_context", "name", "generation_defaults"):
                assert getattr(llm, name) == getattr(reference, name)
            assert llm.stats() == reference.stats()
            await llm.generate("hello", greedy(3))
            assert llm.stats().steps == 3

    asyncio.run(main())


def test_ids_of_requests(make_async):
    async def main():
        async with make_async() as llm:
            named = llm.generate("hello", greedy(3), request_id="mine")
            outputs = await asyncio.gather(named, *[llm.generate("x", greedy(2))] * 1)
            assert outputs[0].request_id == "mine"
            again = await llm.generate("hello", greedy(3), request_id="mine")
            assert again.request_id == "mine", "an ended request's id is free again"
            ids = {(await llm.generate("x", greedy(1))).request_id for _ in range(3)}
            assert len(ids) == 3
            stream = llm.stream("x", greedy(200), request_id="taken")
            await anext(stream)
            with pytest.raises(ValueError, match=r"generate: request_id 'taken' belongs to an unf"):
                await llm.generate("x", request_id="taken")
            await stream.aclose()
            with pytest.raises(TypeError, match=r"chat: request_id is 3; expected a string"):
                await llm.chat(HELLO, request_id=3)
            await until_empty(llm)

    asyncio.run(main())


@pytest.mark.parametrize("op", ["generate", "chat", "stream"])
def test_a_list_may_be_extended_after_the_call(make_async, monkeypatch, op):
    async def main():
        async with make_async() as llm:
            extended = threading.Event()
            reader = llm._llm._reader
            for name in ("read_prompt", "read_chat", "read_one"):
                prepare = getattr(reader, name)

                def late(*arguments, prepare=prepare):
                    assert extended.wait(HANG)
                    return prepare(*arguments)

                monkeypatch.setattr(reader, name, late)
            prompt = [5, 6] if op == "generate" else list(HELLO)
            call = getattr(llm, op)(prompt, greedy(3))
            task = asyncio.create_task(read(call) if op == "stream" else call)
            await asyncio.sleep(0)
            prompt.append("neither a token nor a message")
            extended.set()
            await task

    asyncio.run(main())


def test_one_delivery_a_step_for_each_loop(make_async, monkeypatch):
    async def main():
        async with make_async() as llm:
            loop = asyncio.get_running_loop()
            calls, call_soon = [], loop.call_soon_threadsafe

            def counting(callback, *args, **options):
                if threading.current_thread() is llm._engine._thread:
                    calls.append(callback)
                return call_soon(callback, *args, **options)

            with Gate(monkeypatch, llm) as gate:
                tasks = [asyncio.create_task(read(llm.stream("x", greedy(10)))) for _ in range(8)]
                await gate.reached()
                await until_queued(llm, 8)
                monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
            await asyncio.gather(*tasks)
            assert len(calls) <= llm.stats().steps < 30

    asyncio.run(main())


# --- bad input ------------------------------------------------------------------------------------

BAD_PROMPTS = ["", [], [[5], []], [[5], [6]], ["a", "b"], 7, [1.5], [["a"]], [267], [-1], [5] * 256]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda prompt: str(prompt)[:12])
@pytest.mark.parametrize("streaming", [False, True])
def test_unusable_prompts_are_refused_before_anything_is_queued(
    make_llm, make_async, prompt, streaming
):
    # LLM.stream takes one prompt, as both methods do here.
    with pytest.raises((ValueError, TypeError)) as expected:
        make_llm().stream(prompt)

    async def main():
        async with make_async() as llm:
            with pytest.raises(expected.type) as found:
                await (anext(llm.stream(prompt)) if streaming else llm.generate(prompt))
            op = "stream" if streaming else "generate"
            assert str(found.value) == str(expected.value).replace("stream", op)
            assert not llm._engine._open
            assert llm.stats().steps == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampling_params": {"top_p": 1}}, TypeError, "sampling_params is"),
        ({"sampling_params": [SamplingParams()] * 2}, ValueError, "2 entries"),
        ({"sampling_params": SamplingParams(logit_bias={267: 1.0})}, ValueError, "id 267"),
        ({"sampling_params": SamplingParams(stop_token_ids=(300,))}, ValueError, "id 300"),
        ({"cache_salt": 3}, TypeError, "cache_salt is 3; expected a string"),
        ({"priority": 0.5}, TypeError, "priority is 0.5; expected an integer"),
        ({"priority": 2**31}, ValueError, "priority is 2147483648; expected -2"),
        ({"request_id": b"x"}, TypeError, "request_id is b'x'; expected a string or None"),
    ],
    ids=["dict", "two", "bias", "stop id", "salt", "priority type", "priority range", "id"],
)
@pytest.mark.parametrize("op", ["generate", "chat", "stream"])
def test_unusable_arguments_are_refused(make_async, arguments, error, message, op):
    async def main():
        async with make_async() as llm:
            calls = {
                "generate": lambda: llm.generate("hello", **arguments),
                "chat": lambda: llm.chat(HELLO, **arguments),
                "stream": lambda: anext(llm.stream("hello", **arguments)),
            }
            with pytest.raises(error, match=message):
                await calls[op]()
            assert not llm._engine._open
            assert (await llm.generate("hello", greedy(2))).outputs[0].token_ids

    asyncio.run(main())


@pytest.mark.parametrize(
    ("messages", "error"),
    [([], ValueError), ([{"content": "x"}], ValueError), ("hi", TypeError), ([HELLO], TypeError)],
    ids=str,
)
def test_unusable_conversations_are_refused(make_async, messages, error):
    async def main():
        async with make_async() as llm:
            with pytest.raises(error, match="chat"):
                await llm.chat(messages)
            assert not llm._engine._open

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_waiting": -1}, ValueError, "max_waiting is -1; expected at least 0"),
        ({"max_waiting": 1.5}, TypeError, "max_waiting is 1.5; expected an integer"),
        ({"max_waiting": None}, TypeError, "max_waiting is None"),
        ({"max_batch": 0}, ValueError, "max_batch"),
        ({"max_bach": 3}, TypeError, "max_bach"),
    ],
    ids=str,
)
def test_unusable_options_are_refused_and_start_no_thread(tiny_model, options, error, message):
    threads = threading.active_count()
    with pytest.raises(error, match=message):
        AsyncLLM(tiny_model, **options)
    assert threading.active_count() == threads


def test_methods_have_the_arguments_of_llm():
    for op in ("generate", "chat", "stream"):
        mine = set(inspect.signature(getattr(AsyncLLM, op)).parameters)
        theirs = set(inspect.signature(getattr(LLM, op)).parameters)
        assert mine ^ theirs <= {"request_id", "progress", "prompt", "prompts"}


# --- load -----------------------------------------------------------------------------------------


def test_requests_beyond_max_waiting_are_refused(make_async, monkeypatch):
    async def main():
        llm = make_async(max_batch=2, max_waiting=3)
        with Gate(monkeypatch, llm) as gate:
            tasks = [asyncio.create_task(llm.generate("hello", greedy(4))) for _ in range(5)]
            await gate.reached()
            for _ in range(2):
                with pytest.raises(EngineBusyError, match=r"5 requests .* fewer than 5") as busy:
                    await llm.generate("one more")
                assert (busy.value.unfinished, busy.value.limit) == (5, 5)
                with pytest.raises(EngineBusyError, match="stream"):
                    await anext(llm.stream("one more"))
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks.pop(1)
            # The place is free although the engine still stands in its step.
            tasks.append(asyncio.create_task(llm.generate("hello", greedy(4))))
            await asyncio.sleep(0)
            with pytest.raises(EngineBusyError):
                await llm.generate("one more")
        outputs = await asyncio.gather(*tasks)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 5
        await llm.generate("hello", greedy(2))
        await llm.close()

    asyncio.run(main())


def test_no_waiting_at_all(make_async):
    async def main():
        async with make_async(max_batch=1, max_waiting=0) as llm:
            for _ in range(3):
                both = [llm.generate("hello", greedy(3)) for _ in range(2)]
                first, second = await asyncio.gather(*both, return_exceptions=True)
                assert len(first.outputs[0].token_ids) == 3
                assert isinstance(second, EngineBusyError)

    asyncio.run(main())


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(make_async, make_llm):
    params = greedy(60, n=2)
    (expected,) = make_llm().generate("hello", params)

    async def main():
        async with make_async() as llm:
            slow = llm.stream("hello", params)
            first = await anext(slow)
            await llm.generate("world", greedy(100))
            await until_empty(llm)
            # The request has ended and counts no more; what it gave is still to be read.
            events = [first, *[event async for event in slow]]
            assert len(events) == 120
            return events

    events = asyncio.run(main())
    for sample in expected.outputs:
        own = [event for event in events if event.index == sample.index]
        assert [i for event in own for i in event.token_ids] == sample.token_ids
        assert "".join(event.text for event in own) == sample.text


def test_the_event_loop_runs_while_a_step_does(make_async, monkeypatch):
    """Everything but the results themselves comes about while the engine stands still."""

    async def main():
        llm = make_async()
        with Gate(monkeypatch, llm) as gate:
            running = asyncio.create_task(llm.generate("hello", greedy(4), request_id="a"))
            await gate.reached()
            late = asyncio.create_task(llm.generate("world", greedy(4)))
            stream = llm.stream("x", greedy(4))
            first = asyncio.create_task(anext(stream))
            await until_queued(llm, 3)
            llm.stats()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            await stream.aclose()
            with pytest.raises(ValueError, match="empty"):
                await llm.generate("")
            assert not await llm.abort("a")
        assert len((await late).outputs[0].token_ids) == 4
        await until_empty(llm)
        await llm.close()

    asyncio.run(main())


# --- walking away ---------------------------------------------------------------------------------


def test_a_stream_that_never_began_holds_nothing(make_async):
    async def main():
        async with make_async() as llm:
            stream = llm.stream("hello", greedy())
            assert not llm._engine._open
            await stream.aclose()
            llm.stream("hello", greedy())
            assert llm.stats().steps == 0

    asyncio.run(main())


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "error"])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_returns_its_pages(make_async, way, n):
    async def leave(llm):
        stream = llm.stream("hello", greedy(200, n=n))
        count = 0
        async for _ in stream:
            count += 1
            if count == 7 and way == "break":
                break
            if count == 7 and way == "aclose":
                await stream.aclose()
            if count == 7 and way == "error":
                raise ZeroDivisionError
            if count == 7 and way == "cancel":
                asyncio.current_task().cancel()
                await asyncio.sleep(0)

    async def main():
        async with make_async() as llm:
            await asyncio.gather(leave(llm), return_exceptions=True)
            gc.collect()
            await until_empty(llm)
            assert llm.stats().steps < 200

    asyncio.run(main())


def test_closing_after_the_first_sample_has_ended(make_llm, make_async):
    params = SamplingParams(n=8, seed=1, max_tokens=60, logit_bias={1: 7.0})
    (output,) = make_llm().generate("hello", params)
    assert len({len(sample.token_ids) for sample in output.outputs}) > 2

    async def main():
        async with make_async() as llm:
            stream = llm.stream("hello", params)
            async for event in stream:
                if event.finish_reason is not None:
                    break
            await stream.aclose()
            await until_empty(llm)

    asyncio.run(main())


@pytest.mark.parametrize("streaming", [False, True])
def test_cancelling_at_each_turn_of_the_loop(make_async, streaming):
    """Cancel after 0, 1, 2, ... turns: before, while and after the prompt is prepared."""

    async def main():
        async with make_async(max_waiting=0, max_batch=1) as llm:
            for turns in range(120):
                coroutine = (
                    read(llm.stream("hello", greedy(20)))
                    if streaming
                    else llm.generate("hello", greedy(20))
                )
                task = asyncio.create_task(coroutine)
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            # Were a place lost, this would be refused.
            await llm.generate("hello", greedy(2))
            await until_empty(llm)

    asyncio.run(main())


def test_cancelling_while_the_prompt_is_prepared_queues_nothing(make_async, monkeypatch):
    held, begun = threading.Event(), threading.Event()

    async def main():
        llm = make_async(max_batch=1, max_waiting=0)
        reader = llm._llm._reader
        prepare = reader.read_prompt

        def slow(*arguments):
            begun.set()
            assert held.wait(HANG)
            return prepare(*arguments)

        monkeypatch.setattr(reader, "read_prompt", slow)
        task = asyncio.create_task(llm.generate("hello"))
        assert await asyncio.to_thread(begun.wait, HANG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not llm._engine._open
        begun.clear()
        task = asyncio.create_task(llm.generate("hello", greedy(5), request_id="b"))
        assert await asyncio.to_thread(begun.wait, HANG)
        assert [await llm.abort("b"), await llm.abort("b")] == [True, False]
        held.set()
        (sample,) = (await task).outputs
        assert (sample.token_ids, sample.finish_reason) == ([], "abort")
        assert llm.stats().steps == 0
        await llm.close()

    asyncio.run(main())


def test_abort(make_async, monkeypatch):
    async def main():
        llm = make_async(max_batch=1)
        assert not await llm.abort("nobody")
        assert not await llm.abort(0)
        with Gate(monkeypatch, llm) as gate:
            running = asyncio.create_task(llm.generate("hello", greedy(50), request_id="run"))
            await gate.reached()
            waiting = asyncio.create_task(llm.generate("hello", greedy(50, n=2), request_id="wait"))
            await until_queued(llm, 2)
            answers = [asyncio.create_task(llm.abort(i)) for i in ("run", "run", "wait", "wait")]
            await asyncio.sleep(0)
        assert await asyncio.gather(*answers) == [True, False, True, False]
        assert llm.stats().free_pages == llm.stats().num_pages
        for task, n in ((running, 1), (waiting, 2)):
            assert [s.finish_reason for s in (await task).outputs] == ["abort"] * n
        with Gate(monkeypatch, llm, free_batches=5) as gate:
            stream = llm.stream("hello", greedy(100), request_id="s")
            events = [await anext(stream) for _ in range(3)]
            await gate.reached()
            aborting = asyncio.create_task(llm.abort("s"))
            await asyncio.sleep(0)
        assert await aborting
        assert llm.stats().running == 0
        events += [event async for event in stream]
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["abort"]
        assert not await llm.abort("s")
        await llm.generate("hello", greedy(2), request_id="done")
        assert not await llm.abort("done")
        await llm.close()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_walking_away_at_random_moments(make_llm, make_async, seed):
    """Hundreds are cancelled, closed or aborted; the others get what they get alone."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    kinds = [random_request(rng) for _ in range(10)]
    expected = [samples_of(make_llm().generate([p], s)[0]) for p, s in kinds]
    endings = {"whole": 0, "cut": 0}

    async def one(llm, number):
        kind = rng.randrange(len(kinds))
        prompt, params = kinds[kind]
        await asyncio.sleep(rng.uniform(0, 0.4))
        way = rng.choice(("whole", "cancel", "cancel", "break", "abort", "abort"))
        name, delay = f"request {number}", rng.choice((0, rng.uniform(0, 0.05)))
        samples, events = {}, 0
        stop_at = rng.randint(0, 12) if way == "break" else None
        stream = llm.stream(prompt, params, request_id=name)

        async def consume():
            nonlocal events
            async for event in stream:
                text, ids, _ = samples.get(event.index, ("", [], None))
                samples[event.index] = (text + event.text, ids + event.token_ids, event)
                events += 1
                if events == stop_at:
                    await stream.aclose()

        task = asyncio.create_task(consume())
        if way in ("cancel", "abort"):
            await asyncio.sleep(delay)
            if way == "cancel":
                task.cancel()
            else:
                await llm.abort(name)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        whole = 0
        for index, (text, ids, last) in samples.items():
            wanted = expected[kind][index]
            assert wanted[1][: len(ids)] == ids
            if last.finish_reason in ("stop", "length"):
                assert (text, ids, last.finish_reason) == wanted
                whole += 1
        endings["whole" if whole == params.n else "cut"] += 1

    async def main():
        llm = make_async(num_pages=14, page_size=8, max_step_tokens=9, max_batch=6)
        await asyncio.gather(*[one(llm, number) for number in range(200)])
        await until_empty(llm)
        llm._llm._core.scheduler.pool.check_integrity()
        await llm.close()

    asyncio.run(main())
    assert min(endings.values()) > 20, endings
