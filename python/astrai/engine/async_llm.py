"""AsyncLLM: LLM for event loops."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from astrai.config import ModelConfig
from astrai.engine.core import EngineStats
from astrai.engine.engine_thread import EngineThread
from astrai.engine.errors import EngineStepError
from astrai.engine.llm import LLM, check_errors
from astrai.engine.options import RequestOptions
from astrai.engine.outputs import RequestOutput, StreamEvent
from astrai.engine.prompts import (
    Message,
    PreparedPrompt,
    Prompt,
    check_messages,
    check_streamable,
    params_for_each,
)
from astrai.engine.request import Request
from astrai.engine.ticket import Ticket
from astrai.loading import LoadedModel
from astrai.sampling.params import SamplingParams
from astrai.tokenizer import Tokenizer

DEFAULT_MAX_WAITING = 1024


@dataclass(frozen=True)
class _Call:
    """What a caller asked for; `read` works the prompt out, in a thread."""

    op: str
    read: Callable[[], PreparedPrompt]
    params: SamplingParams
    request_id: str | None
    options: RequestOptions
    streaming: bool = False


class AsyncLLM:
    """Runs one model for many coroutines: `generate`, `chat` and `stream`, all in one batch.

    model        as for LLM
    max_waiting  unfinished requests beyond max_batch: a further one raises EngineBusyError. Zero
                 takes only as many as may run together
    options      every other keyword argument of LLM

    Raises as LLM; ValueError or TypeError for max_waiting. Loading takes a while: in a running
    event loop, make it with `await asyncio.to_thread(AsyncLLM, ...)`.

    A thread of its own runs the model, prompts are tokenised in the event loop's executor, so
    nothing here holds an event loop up. It may be used from several event loops and threads at
    once. A request's tokens are those that LLM gives, whatever else is in the batch. With the
    option `seed`, requests without a seed of their own count in the order of the calls.

    A request ends when the coroutine that waits for it is cancelled or its stream is closed, also
    while its prompt is prepared. Where a step fails, the requests that cannot be computed raise
    EngineStepError and the others go on; if the engine itself cannot go on, all that wait and
    every later call raise EngineClosedError.

    Use it with `async with`, or `close` it. One that is dropped, or left at the end of the
    program, stops by itself.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        max_waiting: int = DEFAULT_MAX_WAITING,
        **options: Any,
    ) -> None:
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int):
            raise TypeError(f"AsyncLLM: max_waiting is {max_waiting!r}; expected an integer")
        if max_waiting < 0:
            raise ValueError(f"AsyncLLM: max_waiting is {max_waiting}; expected at least 0")
        self._llm = LLM(model, **options)
        max_batch = self._llm._engine_config.max_batch
        self._grammar_executor = ThreadPoolExecutor(1, "astrai-grammar")
        self._engine = EngineThread(self._llm._core, max_batch, max_waiting)
        # At the end of the program the thread is stopped and waited for elsewhere.
        weakref.finalize(self, self._engine.stop).atexit = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._llm.tokenizer

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._llm.config

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together that one sequence may have."""
        return self._llm.max_context

    @property
    def name(self) -> str:
        """The alias, or the name of the directory or file that the model came from."""
        return self._llm.name

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """As for LLM."""
        return self._llm.generation_defaults

    def stats(self) -> EngineStats:
        """Counters of the engine after its last step: sequences, pages, preemptions, steps."""
        return self._engine.stats

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> RequestOutput:
        """Continue one prompt.

        prompt           a text or a list of token ids
        sampling_params  None takes the model's recommendations
        request_id       a name for `abort` and for the output, not in use by an unfinished
                         request; default a number
        cache_salt, priority  as for LLM.generate
        Returns          the RequestOutput; finish_reason is "abort" after `abort`
        Raises           ValueError, TypeError as LLM.generate, and ValueError for a request_id in
                         use: nothing has been queued then. EngineBusyError beyond max_waiting.
                         EngineStepError if the request could not be computed, RuntimeError if the
                         model gave no usable logits. EngineClosedError if the engine is closed,
                         be it before or while the request runs.
        """
        reader, prompt = self._llm._reader, _own_list(prompt)
        params = self._params("generate", sampling_params)
        options = RequestOptions.checked("generate", cache_salt, priority)
        read = partial(reader.read_prompt, "generate", prompt, params)
        return await self._complete(_call("generate", read, params, request_id, options))

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        template_values: dict[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer one conversation.

        messages         [{"role": "user", "content": "..."}, ...]
        template_values  more variables for the chat template
        Returns, raises  as generate; ValueError also for a model without a chat template or a
                         conversation that the template refuses
        """
        check_messages("chat", messages)
        params = self._params("chat", sampling_params)
        options = RequestOptions.checked("chat", cache_salt, priority)
        read = partial(
            self._llm._reader.read_chat,
            "chat: conversation",
            _own_list(messages),
            params,
            dict(template_values or {}),
        )
        return await self._complete(_call("chat", read, params, request_id, options))

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        template_values: dict[str, Any] | None = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Continue one prompt or answer one conversation, token by token.

        prompt   a text, a list of token ids, or a list of messages
        Returns  an asynchronous generator of StreamEvent: one for each token, `index` tells
                 samples apart. The texts of one index joined are the text that `generate` gives.
                 After `abort` the last event of each sample has finish_reason "abort".
        Raises   as generate, at the first event for all that concerns the prompt or the engine's
                 load. The request begins there, too.

        `aclose`, or leaving `async for` and dropping the generator, aborts the request. The engine
        does not wait for a slow reader: events that it has not taken are kept, at most max_tokens
        and one more for each of the n samples.
        """
        self._engine.check_open("stream")
        params = self._params("stream", sampling_params)
        options = RequestOptions.checked("stream", cache_salt, priority)
        check_streamable("stream", params)
        read = partial(
            self._llm._reader.read_one,
            "stream",
            _own_list(prompt),
            params,
            dict(template_values or {}),
        )
        return self._events(_call("stream", read, params, request_id, options, streaming=True))

    async def abort(self, request_id: str | int) -> bool:
        """End a request now: who waits for it gets what there is, with finish_reason "abort".

        Returns False if the id is unknown or its request has ended. Otherwise its pages are free
        on return.
        """
        return await self._engine.abort(request_id)

    async def close(self) -> None:
        """End everything, let go of weights and cache, refuse further work.

        Whoever waits for a request gets EngineClosedError. Returns when the thread has ended; may
        be called twice, and from any event loop.
        """
        self._engine.stop()
        await asyncio.to_thread(self._finish_closing)

    def _finish_closing(self) -> None:
        self._grammar_executor.shutdown(wait=False)
        self._engine.join()
        self._llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _params(self, op: str, params: SamplingParams | None) -> SamplingParams:
        return params_for_each(op, params, 1, self._llm._default_params)[0]

    async def _complete(self, call: _Call) -> RequestOutput:
        with self._started(call) as (ticket, seed):
            request = await self._submit(call, ticket, seed)
            await ticket.wait_done()
        _raise_failure(call.op, request)
        return replace(request.output(), request_id=ticket.request_id)

    async def _events(self, call: _Call) -> AsyncGenerator[StreamEvent, None]:
        with self._started(call) as (ticket, seed):
            request = await self._submit(call, ticket, seed)
            while (event := await ticket.next_event()) is not None:
                yield event
        _raise_failure(call.op, request)

    @contextmanager
    def _started(self, call: _Call) -> Iterator[tuple[Ticket, int]]:
        """A place for the request and its seed; the request ends with the block."""
        ticket = self._engine.admit(call.op, call.request_id)
        try:
            yield ticket, self._llm._seed_for(call.params)
        finally:
            self._engine.release(ticket)

    async def _read(self, call: _Call) -> PreparedPrompt:
        # A form that is not known yet may take seconds to compile, one after the other. Prompts
        # without one must not stand in line behind it.
        form = call.params.structured
        is_new = form is not None and self._llm._grammars.cached(form) is None
        executor = self._grammar_executor if is_new else None

        def read() -> PreparedPrompt:
            self._engine.check_open(call.op)
            try:
                return call.read()
            except Exception:
                # Closing ends what is being compiled: that is what went wrong then.
                self._engine.check_open(call.op)
                raise

        return await asyncio.get_running_loop().run_in_executor(executor, read)

    async def _submit(self, call: _Call, ticket: Ticket, seed: int) -> Request:
        prepared = await self._read(call)
        request = self._llm._make_request(prepared, seed, call.options, call.streaming)
        self._engine.submit(ticket, request)
        return request


def _call(
    op: str,
    read: Callable[[], PreparedPrompt],
    params: SamplingParams,
    request_id: str | None,
    options: RequestOptions,
    streaming: bool = False,
) -> _Call:
    if request_id is not None and not isinstance(request_id, str):
        raise TypeError(f"{op}: request_id is {request_id!r}; expected a string or None")
    return _Call(op, read, params, request_id, options, streaming)


def _own_list(prompt: Any) -> Any:
    """A copy of a list, which its owner may extend before a thread has read it."""
    return list(prompt) if isinstance(prompt, list) else prompt


def _raise_failure(op: str, request: Request) -> None:
    if request.error is not None:
        kind = type(request.error).__name__
        raise EngineStepError(
            f"{op}: the engine failed at this request with {kind}: {request.error}"
        ) from request.error
    check_errors(op, [request])
