"""AsyncLLM when something breaks, closes or vanishes: the right ones hear of it, nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from astrai import LLM, SamplingParams, StructuredOutput
from astrai.engine import EngineClosedError, EngineStepError
from engine_checks import (
    HANG,
    Gate,
    before_each_batch,
    check_empty,
    until,
    until_empty,
    until_queued,
)

HELLO = [{"role": "user", "content": "hello"}]
GUILTY = 66  # a token of the guilty prompt alone
INNOCENT = [[5, 6, 7], list(range(100, 130)), [9] * 12]


def greedy(max_tokens=12, **params):
    params.setdefault("ignore_eos", True)
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def is_guilty(batch):
    return any(GUILTY in sequence.request.prompt_ids for sequence in batch.sequences)


async def read(events, into=None):
    seen = [] if into is None else into
    async for event in events:
        seen.append(event)
    return seen


def all_at_once(llm, prompts, params):
    """Generate and stream every prompt: outputs or exceptions, and likewise lists of events."""
    return asyncio.gather(
        *[llm.generate(prompt, params) for prompt in prompts],
        *[read(llm.stream(prompt, params)) for prompt in prompts],
        return_exceptions=True,
    )


def check_innocent(results, prompts, reference, params):
    outputs, streams = results[: len(prompts)], results[len(prompts) :]
    for prompt, output, events in zip(prompts, outputs, streams, strict=True):
        (expected,) = reference.generate(prompt, params)
        assert output.outputs == expected.outputs
        for sample in expected.outputs:
            own = [event for event in events if event.index == sample.index]
            assert "".join(event.text for event in own) == sample.text
            assert [i for event in own for i in event.token_ids] == sample.token_ids
            assert own[-1].finish_reason == sample.finish_reason


# --- a step fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("n", [1, 3])
def test_only_the_guilty_request_fails(make_llm, make_async, monkeypatch, phase, error, n):
    params = greedy(20, n=n)
    guilty_prompt = [8, GUILTY, 8]

    def hook(batch):
        is_decode = all(q_len == 1 for q_len in batch.q_lens) and len(batch.sampled) == len(
            batch.sequences
        )
        if is_guilty(batch) and is_decode == (phase == "decode"):
            raise error("the forward pass failed")

    async def main():
        async with make_async(max_step_tokens=16) as llm:
            before_each_batch(monkeypatch, llm._llm, hook)
            prompts = [INNOCENT[0], guilty_prompt, *INNOCENT[1:]]
            for _ in range(2):  # the engine goes on afterwards
                results = await all_at_once(llm, prompts, params)
                for failure in (results.pop(5), results.pop(1)):
                    assert isinstance(failure, EngineStepError)
                    assert isinstance(failure.__cause__, error)
                    assert str(failure).endswith(
                        f"failed at this request with {error.__name__}: the forward pass failed"
                    )
                check_innocent(results, INNOCENT, make_llm(), params)
            await until_empty(llm)

    asyncio.run(main())


def test_failure_of_the_sampler_hits_one_request(make_llm, make_async, monkeypatch):
    async def main():
        async with make_async() as llm:
            sampler = llm._llm._core._sampler
            sample = sampler.sample

            def failing(logits, info):
                if any(GUILTY in row.prompt_ids for row in info.rows):
                    raise ZeroDivisionError
                return sample(logits, info)

            monkeypatch.setattr(sampler, "sample", failing)
            results = await all_at_once(llm, [*INNOCENT, [GUILTY]], greedy())
            for failure in (results.pop(7), results.pop(3)):
                assert isinstance(failure, EngineStepError)
                assert isinstance(failure.__cause__, ZeroDivisionError)
            check_innocent(results, INNOCENT, make_llm(), greedy())
            await until_empty(llm)

    asyncio.run(main())


def break_text(monkeypatch, llm):
    """The third token of the guilty prompt has no text."""
    submit = llm._core.submit

    def submit_broken(request):
        submit(request)
        if GUILTY in request.prompt_ids:
            text = request.sequences[-1].text
            add, calls = text.add, []

            def failing(*arguments):
                calls.append(1)
                if len(calls) == 3:
                    raise LookupError("no such piece")
                return add(*arguments)

            text.add = failing

    monkeypatch.setattr(llm._core, "submit", submit_broken)


@pytest.mark.parametrize("n", [1, 2])
def test_failure_of_the_detokenizer_hits_one_request(make_llm, make_async, monkeypatch, n):
    async def main():
        async with make_async() as llm:
            break_text(monkeypatch, llm._llm)
            results = await all_at_once(llm, [*INNOCENT, [GUILTY]], greedy(n=n))
            for failure in (results.pop(7), results.pop(3)):
                assert isinstance(failure.__cause__, LookupError)
            check_innocent(results, INNOCENT, make_llm(), greedy(n=n))
            await until_empty(llm)

    asyncio.run(main())


def test_failure_of_the_detokenizer_leaves_other_streams_of_llm_alone(make_llm, monkeypatch):
    """The stream that is read meets its neighbour's failure; the neighbour meets it itself."""
    llm = make_llm()
    expected = [event.text for event in llm.stream("hello", greedy())]
    break_text(monkeypatch, llm)
    guilty, other = llm.stream([GUILTY], greedy()), llm.stream("hello", greedy())
    next(guilty)
    assert [event.text for event in other] == expected
    with pytest.raises(LookupError, match="no such piece"):
        list(guilty)
    check_empty(llm)


@pytest.mark.parametrize("streaming", [False, True])
def test_failure_of_every_step_reaches_everybody_and_passes(make_async, monkeypatch, streaming):
    async def main():
        async with make_async(max_batch=3) as llm:
            with monkeypatch.context() as patch:
                before_each_batch(patch, llm._llm, lambda batch: 1 / 0)
                calls = [
                    read(llm.stream("hello", greedy()))
                    if streaming
                    else llm.generate("hello", greedy())
                    for _ in range(9)
                ]
                for failure in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(failure, EngineStepError)
                    assert isinstance(failure.__cause__, ZeroDivisionError)
            assert len((await llm.generate("hello", greedy())).outputs[0].token_ids) == 12
            await until_empty(llm)

    asyncio.run(main())


def test_batches_that_fail_together_and_not_alone_still_get_on(make_llm, make_async, monkeypatch):
    def hook(batch):
        if len({sequence.request.request_id for sequence in batch.sequences}) > 1:
            raise MemoryError("too many at once")

    async def main():
        async with make_async(num_pages=8, max_step_tokens=9) as llm:
            before_each_batch(monkeypatch, llm._llm, hook)
            results = await all_at_once(llm, INNOCENT, greedy(30))
            check_innocent(results, INNOCENT, make_llm(), greedy(30))
            await until_empty(llm)

    asyncio.run(main())


def test_failure_at_queueing_hits_one_request(make_async, monkeypatch):
    async def main():
        async with make_async() as llm:
            core = llm._llm._core
            submit = core.submit

            def failing(request):
                if GUILTY in request.prompt_ids:
                    raise MemoryError("no room for a request")
                submit(request)

            monkeypatch.setattr(core, "submit", failing)
            other = asyncio.create_task(llm.generate("hello", greedy(30)))
            with pytest.raises(EngineStepError, match="MemoryError: no room") as failure:
                await llm.generate([GUILTY])
            assert isinstance(failure.value.__cause__, MemoryError)
            with pytest.raises(EngineStepError):
                await read(llm.stream([GUILTY]))
            assert len((await other).outputs[0].token_ids) == 30

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 2])
def test_logits_that_are_not_finite_are_an_error_of_their_request(
    make_llm, make_async, monkeypatch, n
):
    async def main():
        async with make_async() as llm:
            executor = llm._llm._core._executor
            decode = executor.execute_decode

            def broken(batch):
                logits = decode(batch).clone()
                for row, sequence in enumerate(batch.sequences):
                    if GUILTY in sequence.request.prompt_ids and sequence.index == n - 1:
                        logits[row] = float("nan")
                return logits

            monkeypatch.setattr(executor, "execute_decode", broken)
            results = await all_at_once(llm, [*INNOCENT, [GUILTY]], greedy(n=n))
            stream, output = results.pop(7), results.pop(3)
            assert str(output).startswith("generate: prompt 0: the model's logits are not finite")
            assert str(stream).startswith("stream: prompt 0: the model's logits are not finite")
            check_innocent(results, INNOCENT, make_llm(), greedy(n=n))
            seen = []
            with pytest.raises(RuntimeError, match="not finite"):
                await read(llm.stream([GUILTY], greedy(n=n)), into=seen)
            reasons = [event.finish_reason for event in seen if event.index == n - 1]
            assert reasons[-1] == "error"

    asyncio.run(main())


# --- the engine fails -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "error"),
    [("schedule_decode", MemoryError), ("schedule_prefill", RuntimeError), (None, SystemExit)],
    ids=["decode", "prefill", "exit"],
)
def test_an_engine_that_cannot_go_on_tells_everybody(make_async, monkeypatch, place, error):
    async def main():
        llm = make_async(max_batch=2)
        core = llm._llm._core
        with Gate(monkeypatch, llm) as gate:
            tasks = [asyncio.create_task(llm.generate("hello", greedy())) for _ in range(4)]
            tasks += [asyncio.create_task(read(llm.stream("hello", greedy()))) for _ in range(2)]
            await gate.reached()
            await until_queued(llm, 6)
            aborting = asyncio.create_task(llm.abort("nobody"))

            def failing(*arguments):
                raise error("broken")

            if place is None:
                monkeypatch.setattr(core._executor, "execute_decode", failing)
            else:
                monkeypatch.setattr(core.scheduler, place, failing)
        for failure in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(failure, EngineClosedError)
            assert isinstance(failure.__cause__, error)
            assert f"the engine stopped after {error.__name__}: broken" in str(failure)
        assert not await aborting
        assert not await llm.abort(0)
        for call in (llm.generate("x"), llm.chat(HELLO)):
            with pytest.raises(EngineClosedError, match="stopped after") as later:
                await call
            assert isinstance(later.value.__cause__, error)
        with pytest.raises(EngineClosedError, match="stopped after"):
            llm.stream("x")
        await llm.close()
        assert llm.stats().free_pages == llm.stats().num_pages

    asyncio.run(main())


def test_an_engine_that_is_torn_still_tells_everybody(make_async, monkeypatch):
    """Somebody walks away in the step that breaks the engine, and nothing can be aborted then."""

    async def main():
        llm = make_async()
        core = llm._llm._core

        def failing(*arguments):
            raise SystemExit("broken")

        before_each_batch(monkeypatch, llm._llm, failing)
        with Gate(monkeypatch, llm) as gate:
            leaving, staying = (
                asyncio.create_task(llm.generate("hello", greedy())) for _ in range(2)
            )
            await gate.reached()
            await until_queued(llm, 2)
            leaving.cancel()
            await asyncio.wait([leaving])
            monkeypatch.setattr(core, "abort", failing)
        with pytest.raises(EngineClosedError, match="stopped after SystemExit: broken"):
            await asyncio.wait_for(staying, HANG)
        await llm.close()

    asyncio.run(main())


# --- closing --------------------------------------------------------------------------------------


def test_closing_ends_everything_in_flight(make_async, monkeypatch):
    held, begun = threading.Event(), threading.Event()

    async def main():
        llm = make_async(max_batch=2)
        slow = llm.stream("hello", greedy(200))
        with Gate(monkeypatch, llm, free_batches=5) as gate:
            await anext(slow)
            await gate.reached()
            (ticket,) = llm._engine._open.values()
            await until(lambda: len(ticket._events) == 4)
            tasks = [asyncio.create_task(llm.generate("hello", greedy(50))) for _ in range(3)]
            tasks.append(asyncio.create_task(read(llm.stream("hello", greedy(50)))))
            await until_queued(llm, 5)
            reader = llm._llm._reader
            prepare = reader.read_prompt

            def preparing(*arguments):
                begun.set()
                assert held.wait(HANG)
                return prepare(*arguments)

            monkeypatch.setattr(reader, "read_prompt", preparing)
            tasks.append(asyncio.create_task(llm.generate("late")))
            assert await asyncio.to_thread(begun.wait, HANG)
            closing = [asyncio.create_task(llm.close()) for _ in range(2)]
            await asyncio.sleep(0)
            # From the first moment on, while the engine still stands in its step.
            with pytest.raises(EngineClosedError, match="generate: this AsyncLLM was closed"):
                await llm.generate("hello")
            with pytest.raises(EngineClosedError, match="stream"):
                llm.stream("hello")
            assert not await llm.abort("nobody")
            held.set()
        await asyncio.gather(*closing)
        for failure in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(failure, EngineClosedError)
            assert failure.__cause__ is None
        seen = []
        with pytest.raises(EngineClosedError, match="stream: this AsyncLLM was closed"):
            await read(slow, into=seen)
        assert len(seen) >= 4
        assert all(event.finish_reason is None for event in seen)
        assert not llm._engine._thread.is_alive()
        stats = llm.stats()
        assert (stats.waiting, stats.running, stats.free_pages) == (0, 0, stats.num_pages)
        assert llm._llm._kv is None
        await llm.close()

    asyncio.run(main())


def test_a_stream_begun_before_and_read_after_closing(make_async):
    async def main():
        llm = make_async()
        stream = llm.stream("hello", greedy())
        async with llm:
            pass
        with pytest.raises(EngineClosedError):
            await anext(stream)
        for call in (llm.generate("x"), llm.chat(HELLO)):
            with pytest.raises(EngineClosedError):
                await call

    asyncio.run(main())


def test_closing_in_another_event_loop(make_async):
    llm = make_async()
    output = asyncio.run(llm.generate("hello", greedy(3)))
    assert len(output.outputs[0].token_ids) == 3
    asyncio.run(llm.close())
    asyncio.run(llm.close())
    assert not llm._engine._thread.is_alive()


@pytest.mark.filterwarnings("ignore:coroutine method 'aclose':RuntimeWarning")
@pytest.mark.parametrize("streaming", [False, True])
def test_event_loop_that_is_closed_with_requests_in_flight(make_async, monkeypatch, streaming):
    """The requests of a loop that is gone end; another loop's go on, and no thread dies."""
    llm = make_async(max_batch=4, max_waiting=0)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # "Task was destroyed"

    async def start():
        if streaming:
            calls = [read(llm.stream("hello", greedy(200))) for _ in range(3)]
        else:
            calls = [llm.generate("hello", greedy(8)) for _ in range(3)]
        tasks = [asyncio.create_task(call) for call in calls]
        await until_queued(llm, 3)
        return tasks

    with Gate(monkeypatch, llm) as gate:
        tasks = loop.run_until_complete(start())
        loop.run_until_complete(gate.reached())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    async def others():
        output = await llm.generate("hello", greedy(20))
        assert len(output.outputs[0].token_ids) == 20
        await until_empty(llm)
        assert llm.stats().steps < 100
        await llm.close()

    asyncio.run(others())
    for task in tasks:
        task._log_destroy_pending = False
    del task, tasks
    gc.collect()
    assert not llm._engine._thread.is_alive()


@pytest.mark.parametrize("engines", [1, 2])
def test_several_loops_in_several_threads(make_llm, make_async, engines):
    """Two loops on one engine, or each on its own over the same weights."""
    params = SamplingParams(seed=3, n=2, max_tokens=15, ignore_eos=True)
    llms = [make_async() for _ in range(engines)]
    results = {}

    async def main(place):
        results[place] = await all_at_once(llms[place % engines], INNOCENT * 4, params)

    threads = [threading.Thread(target=asyncio.run, args=(main(i),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    for place in range(3):
        check_innocent(results[place], INNOCENT * 4, make_llm(), params)
    for llm in llms:
        asyncio.run(llm.close())


def test_an_engine_that_is_dropped_stops(tiny_model):
    from astrai import AsyncLLM

    llm = AsyncLLM(tiny_model, num_pages=16)
    thread = llm._engine._thread
    asyncio.run(llm.generate("hello", greedy(2)))
    del llm
    gc.collect()
    thread.join(HANG)
    assert not thread.is_alive()


# --- processes ------------------------------------------------------------------------------------


def run(code, folder):
    """Run code in an interpreter of its own, over the tiny model as `model`."""
    start = f"""
        import asyncio, os, pathlib, sys, threading
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from astrai import AsyncLLM, SamplingParams
        from checkpoints import make_tiny_model
        model = make_tiny_model(pathlib.Path({str(folder)!r}))
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(start) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"ASTRAI_DEVICE": "cpu"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def test_program_that_ends_without_closing_in_the_middle_of_a_step(tmp_path):
    out = run(
        """
        import time
        loop = asyncio.new_event_loop()
        llm = AsyncLLM(model, num_pages=64)
        inside = threading.Event()
        executor = llm._llm._core._executor
        decode = executor.execute_decode
        def slow(batch):
            inside.set()
            time.sleep(0.3)
            logits = decode(batch)
            print("computed", flush=True)
            return logits
        executor.execute_decode = slow
        stream = llm.stream("hello", long)
        loop.run_until_complete(anext(stream))
        other = AsyncLLM(model, num_pages=64)
        loop.create_task(other.generate("hello", long))
        idle = AsyncLLM(model, num_pages=64)
        loop.run_until_complete(asyncio.sleep(0.05))
        inside.wait()
        """,
        tmp_path,
    )
    assert out.splitlines() == ["computed"] * len(out.splitlines())
    assert out, "the step was not waited for"


def test_program_whose_other_thread_still_waits_for_a_request(tmp_path):
    """The main thread's end does not cut a request short that another thread awaits."""
    out = run(
        """
        llm = AsyncLLM(model, num_pages=64)
        loop = asyncio.new_event_loop()
        begun = threading.Event()
        async def last_token():
            async for event in llm.stream("hello", long):
                begun.set()
            return event
        def other():
            print(loop.run_until_complete(last_token()).finish_reason)
            loop.close()
        threading.Thread(target=other).start()
        begun.wait()
        """,
        tmp_path,
    )
    assert out == "length\n"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking with threads warns from 3.12 on")
def test_a_fork_is_refused(tmp_path):
    out = run(
        """
        import atexit
        llm = AsyncLLM(model, num_pages=64)
        asyncio.run(llm.generate("hello", SamplingParams(max_tokens=2)))
        child = os.fork()
        if child == 0:
            for call in (llm.generate("hello", long), llm.abort("x")):
                try:
                    asyncio.run(call)
                except RuntimeError as error:
                    print(error, flush=True)
            atexit._run_exitfuncs()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        print(len(asyncio.run(llm.generate("hello", long)).outputs[0].token_ids))
        asyncio.run(llm.close())
        """,
        tmp_path,
    )
    first, second, third = out.splitlines()
    assert first.startswith("generate: the engine belongs to process")
    assert second.startswith("abort: the engine belongs to process")
    assert third == "200"


def test_llm_steps_are_unchanged_by_a_failure_elsewhere(make_llm, monkeypatch):
    """LLM itself raises what a step raised, and its other requests can go on."""
    llm = make_llm()
    stream = llm.stream("hello", greedy(10))
    expected = [event.text for event in llm.stream("hello", greedy(10))]
    seen = [next(stream).text]
    with monkeypatch.context() as patch:
        before_each_batch(patch, llm, lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate("world")
    assert isinstance(llm, LLM)
    assert seen + [event.text for event in stream] == expected


def test_a_form_that_takes_long_holds_up_nobody_else(make_async):
    """Not the prompts without a form, not those whose form is known, and not `close`."""
    hostile = {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]}
    known = StructuredOutput(choice=["yes", "no"])
    options = {"max_tokens": 4, "temperature": 0}

    async def main():
        llm = make_async()
        await llm.generate("hello", SamplingParams(structured=known, **options))
        stuck = []
        for place in range(8):  # more than the event loop's executor has threads
            form = StructuredOutput(json_schema={**hostile, "title": str(place)})
            stuck.append(asyncio.create_task(llm.generate("x", SamplingParams(structured=form))))
        await asyncio.sleep(0.2)
        await asyncio.wait_for(llm.generate("hello", SamplingParams(**options)), HANG)
        output = await asyncio.wait_for(
            llm.generate("hello", SamplingParams(structured=known, **options)), HANG
        )
        assert output.outputs[0].text in ("yes", "no")
        assert not any(task.done() for task in stuck), "too fast to show anything"
        stuck.pop().cancel()
        await asyncio.wait_for(llm.close(), HANG)
        ends = await asyncio.wait_for(asyncio.gather(*stuck, return_exceptions=True), HANG)
        assert [type(end) for end in ends] == [EngineClosedError] * 7

    asyncio.run(main())
