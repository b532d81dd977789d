"""LLM: a model that answers, in one object."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from astrai.attention import ATTN_BACKEND, select_backend
from astrai.attention import attn_backend as choose_backend
from astrai.config import EngineConfig, ModelConfig
from astrai.engine.core import EngineCore, EngineStats
from astrai.engine.executor import Executor
from astrai.engine.interrupt import deferred_interrupt
from astrai.engine.options import RequestOptions
from astrai.engine.outputs import RequestOutput, StreamEvent
from astrai.engine.prompts import (
    Message,
    PreparedPrompt,
    Prompt,
    PromptLimits,
    PromptReader,
    check_messages,
    check_streamable,
    is_conversation,
    params_for_each,
    split_prompts,
)
from astrai.engine.request import Request
from astrai.engine.scheduler import Scheduler
from astrai.engine.sizing import default_num_pages, free_memory
from astrai.kv_cache import KVCache
from astrai.loading import LoadedModel, load_model
from astrai.sampling.params import SamplingParams
from astrai.sampling.random import derived_seed, fresh_seed
from astrai.sampling.sampler import Sampler
from astrai.structured.compiler import GrammarCompiler
from astrai.tokenizer import Tokenizer

Progress = Callable[[int, int], None]

_logger = logging.getLogger("astrai.engine")


class LLM:
    """Runs one model: `generate`, `chat` and `stream`.

    model            an alias ("smollm2-135m"), a Hugging Face directory, a .gguf file, or a
                     LoadedModel
    device           "auto" takes what ASTRAI_DEVICE names, else a GPU that this build has kernels
                     for, else the CPU
    dtype            "auto" keeps the stored dtype (bfloat16 for quantised files); or "float32",
                     "float16", "bfloat16"
    max_batch        sequences that run together; more wait in line
    max_context      tokens of prompt and output together; default the model's max_position
    page_size        tokens in a page of the KV cache
    num_pages        pages of the KV cache; default enough for max_batch sequences of max_context
                     tokens, but at most a quarter of the memory that is free (85% on a GPU)
    max_step_tokens  prompt tokens computed in one step, shared by the prompts being read
    prefix_caching   keep what was computed for a text findable, in whole pages, until its memory
                     is needed: a request that begins with the same tokens starts behind them
    deterministic    CPU only: logits, and so tokens and log probabilities, have the same bits
                     whatever else is in the batch and however a prompt is cut into chunks, found
                     in the cache or computed again; prompts are read more slowly
    seed             makes requests without a seed of their own repeatable: the k-th such request
                     gets a seed derived from this one and k; default fresh randomness
    attn_backend     "torch_native", "cpu", "cuda", "flash" or an ATTN_BACKEND: exactly this one,
                     or an error; default the best one that can serve
    progress         called as progress(bytes_done, bytes_total) while weights are loaded

    Raises FileNotFoundError, ValueError or TypeError for a model or value that cannot be used.

    Use it as a context manager or call `close`. `generate`, `chat` and several `stream`s may be
    interleaved in one thread: all requests share the batch.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        max_batch: int = 64,
        max_context: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        max_step_tokens: int = 2048,
        prefix_caching: bool = True,
        deterministic: bool = False,
        seed: int | None = None,
        attn_backend: ATTN_BACKEND | str | None = None,
        progress: Progress | None = None,
    ) -> None:
        engine = EngineConfig(
            max_batch,
            max_context,
            page_size,
            num_pages,
            max_step_tokens,
            seed,
            prefix_caching,
            deterministic,
        )
        loaded = _load(model, device, dtype, progress)
        config = loaded.config
        weight = loaded.model.embedding.weight
        if attn_backend is not None:
            with choose_backend(attn_backend):  # an explicit choice that cannot serve raises now
                select_backend(weight.device, weight.dtype, config.head_dim)
        if deterministic:
            _check_deterministic(loaded, attn_backend)
        context = _context(config, max_context)
        if num_pages is None:
            free_bytes, share = free_memory(weight.device)
            num_pages = default_num_pages(
                config,
                max_batch=max_batch,
                max_context=context,
                page_size=page_size,
                dtype=weight.dtype,
                free_bytes=free_bytes,
                share=share,
            )
        self._kv: KVCache | None = KVCache(
            config,
            num_pages=num_pages,
            page_size=page_size,
            dtype=weight.dtype,
            device=weight.device,
            max_batch=max_batch,
            max_context=context,
            max_step_tokens=max(max_step_tokens, max_batch),
            match_decode=deterministic,
        )
        tokenizer = loaded.tokenizer
        vocab_size = min(config.vocab_size, tokenizer.vocab_size)
        self._core = EngineCore(
            Scheduler(
                self._kv.pool,
                max_batch=max_batch,
                max_step_tokens=max_step_tokens,
                prefix_caching=prefix_caching,
            ),
            Executor(loaded.model, self._kv, weight.device, attn_backend),
            Sampler(vocab_size),
            tokenizer,
            tokenizer.special_ids,
        )
        eos_token_ids = _reachable_eos(loaded.name, config.eos_token_ids, vocab_size)
        self._grammars = GrammarCompiler(
            tokenizer, vocab_size, {*tokenizer.special_ids, *eos_token_ids}
        )
        self._reader = PromptReader(
            tokenizer,
            loaded.chat_template,
            eos_token_ids,
            PromptLimits(vocab_size, context, num_pages, page_size),
            self._grammars,
        )
        self._config, self._tokenizer = config, tokenizer
        self._name, self._generation_defaults = loaded.name, dict(loaded.generation_defaults)
        self._engine_config = engine
        self._default_params = _default_params(loaded)
        # Counters that several threads may draw from.
        self._request_ids, self._unseeded = count(), count()
        self._is_closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    @property
    def kv_cache(self) -> KVCache:
        """The paged KV cache, for inspection. Raises RuntimeError once closed."""
        self._check_open("kv_cache")
        assert self._kv is not None  # only close lets it go
        return self._kv

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together that one sequence may have."""
        return _context(self.config, self._engine_config.max_context)

    @property
    def name(self) -> str:
        """The alias, or the name of the directory or file that the model came from."""
        return self._name

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Sampling values that the model's files recommend, by field of SamplingParams.

        They hold where sampling_params is None.
        """
        return dict(self._generation_defaults)

    def stats(self) -> EngineStats:
        """Counters of the engine now: sequences, pages, preemptions, steps."""
        return self._core.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Continue one or several prompts, together in a batch.

        prompts          a text, a list of token ids, or a list of these
        sampling_params  for all prompts, or one for each; None takes the model's recommendations
        cache_salt       only requests with the same one share cached prefixes: one for each tenant
                         keeps what others have asked from showing in the time to the first token
        priority         the lower it is, the sooner the request is served; running requests of
                         higher numbers give way to it
        progress         called as progress(samples_done, samples_total) as samples end
        Returns          one RequestOutput for each prompt, in order
        Raises           ValueError, TypeError: a prompt or parameter cannot be used; nothing has
                         been queued then. RuntimeError: the model gave no usable logits, or
                         the parameters ruled out every token.

        Whatever exception leaves it, a KeyboardInterrupt included, its requests are aborted and
        their pages returned.
        """
        self._check_open("generate")
        texts = split_prompts("generate", prompts)
        params = params_for_each("generate", sampling_params, len(texts), self._default_params)
        prepared = [
            self._reader.read(f"generate: prompt {i}", text, p)
            for i, (text, p) in enumerate(zip(texts, params, strict=True))
        ]
        return self._run(
            "generate", prepared, progress, RequestOptions.checked("generate", cache_salt, priority)
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        progress: Progress | None = None,
        template_values: dict[str, Any] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or several in a batch.

        messages         [{"role": "user", "content": "..."}, ...], or a list of such lists
        cache_salt, priority  as in generate
        template_values  more variables for the chat template
        Returns          a RequestOutput for one conversation, a list for several
        Raises           as generate; ValueError also for a model without a chat template or a
                         conversation that the template refuses
        """
        self._check_open("chat")
        check_messages("chat", messages)
        conversations: Sequence[Any] = [messages] if is_conversation(messages) else messages
        params = params_for_each("chat", sampling_params, len(conversations), self._default_params)
        prepared = [
            self._reader.read_chat(f"chat: conversation {i}", talk, p, template_values or {})
            for i, (talk, p) in enumerate(zip(conversations, params, strict=True))
        ]
        outputs = self._run(
            "chat", prepared, progress, RequestOptions.checked("chat", cache_salt, priority)
        )
        return outputs[0] if is_conversation(messages) else outputs

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        template_values: dict[str, Any] | None = None,
    ) -> Generator[StreamEvent, None, None]:
        """Continue one prompt or answer one conversation, token by token.

        prompt   a text, a list of token ids, or a list of messages
        cache_salt, priority  as in generate
        Returns  a generator of StreamEvent: one for each token, `index` tells samples apart. The
                 texts of one index joined are the text that `generate` gives.
        Raises   as generate, at the call and not at the first event; ValueError also for a best_of
                 above n, whose samples are chosen at the end

        Closing the generator early, or leaving it to an exception, aborts the request.
        """
        self._check_open("stream")
        params = params_for_each("stream", sampling_params, 1, self._default_params)[0]
        check_streamable("stream", params)
        prepared = self._reader.read_one("stream", prompt, params, template_values or {})
        return self._events(prepared, RequestOptions.checked("stream", cache_salt, priority))

    def close(self) -> None:
        """Abort what is unfinished, let go of weights and cache, refuse further work.

        May be called twice. Memory is freed unless the caller holds the model elsewhere.
        """
        if not self._is_closed:
            self._is_closed = True
            try:
                self._core.abort_all()
            finally:
                self._core.release_executor()
                self._grammars.close()
                self._kv = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self, op: str) -> None:
        if self._is_closed:
            raise RuntimeError(f"{op}: this LLM was closed; expected an open one")

    def _submit(
        self, prepared: PreparedPrompt, options: RequestOptions, streaming: bool = False
    ) -> Request:
        request = self._make_request(prepared, self._seed_for(prepared.params), options, streaming)
        self._core.submit(request)
        return request

    def _make_request(
        self, prepared: PreparedPrompt, seed: int, options: RequestOptions, streaming: bool
    ) -> Request:
        return Request(
            next(self._request_ids),
            prepared.text,
            prepared.token_ids,
            prepared.params,
            seed=seed,
            max_new_tokens=prepared.max_new_tokens,
            stop_ids=prepared.stop_ids,
            bad_ids=prepared.bad_ids,
            cache_salt=options.cache_salt,
            priority=options.priority,
            streaming=streaming,
            grammar=prepared.grammar,
        )

    def _seed_for(self, params: SamplingParams) -> int:
        """The seed in force: the request's own, or the engine's next one."""
        if params.seed is not None:
            return params.seed
        if self._engine_config.seed is None:
            return fresh_seed()
        return derived_seed(self._engine_config.seed, next(self._unseeded))

    def _run(
        self,
        op: str,
        prepared: Sequence[PreparedPrompt],
        progress: Progress | None,
        options: RequestOptions,
    ) -> list[RequestOutput]:
        requests: list[Request] = []
        total = sum(item.params.num_samples for item in prepared)
        done = -1
        try:
            with deferred_interrupt() as check_interrupt:
                for item in prepared:
                    requests.append(self._submit(item, options))
                unfinished = deque(requests)
                while unfinished:
                    if unfinished[0].is_finished:
                        unfinished.popleft()
                        continue
                    if progress is not None:
                        finished = sum(request.num_finished for request in requests)
                        if finished != done:
                            done = finished
                            progress(done, total)
                    self._check_open(op)
                    self._core.step()
                    check_interrupt()
            if progress is not None:
                progress(total, total)
        except BaseException:
            for request in requests:
                self._core.abort(request.request_id)
            raise
        check_errors(op, requests)
        return [request.output() for request in requests]

    def _events(
        self, prepared: PreparedPrompt, options: RequestOptions
    ) -> Generator[StreamEvent, None, None]:
        self._check_open("stream")
        request = self._submit(prepared, options, streaming=True)
        events = request.events
        assert events is not None  # streaming requests have a queue
        try:
            while True:
                while events:
                    yield events.popleft()
                if request.is_finished:
                    break
                self._check_open("stream")
                with deferred_interrupt():
                    self._core.step()
        finally:
            self._core.abort(request.request_id)
        check_errors("stream", [request])


def _load(
    model: str | Path | LoadedModel,
    device: str | torch.device,
    dtype: str | torch.dtype,
    progress: Progress | None,
) -> LoadedModel:
    if not isinstance(model, LoadedModel):
        return load_model(model, dtype=dtype, device=device, progress=progress)
    weight = model.model.embedding.weight
    if device != "auto" and torch.device(device).type != weight.device.type:
        raise ValueError(
            f"LLM: device {device!r}, the loaded model is on {weight.device}; expected 'auto'"
        )
    if dtype != "auto" and str(dtype).removeprefix("torch.") != str(weight.dtype).removeprefix(
        "torch."
    ):
        raise ValueError(
            f"LLM: dtype {dtype!r}, the loaded model is {weight.dtype}; expected 'auto'"
        )
    return model


def _check_deterministic(loaded: LoadedModel, choice: ATTN_BACKEND | str | None) -> None:
    weight = loaded.model.embedding.weight
    with nullcontext() if choice is None else choose_backend(choice):
        kind = select_backend(weight.device, weight.dtype, loaded.config.head_dim).kind
    if kind is not ATTN_BACKEND.CPU:
        raise ValueError(
            f"LLM: deterministic with attention backend {kind.value} on {weight.device}; "
            f"expected backend {ATTN_BACKEND.CPU.value}, the only one that can promise it"
        )


def _default_params(loaded: LoadedModel) -> SamplingParams:
    try:
        return SamplingParams(**loaded.generation_defaults)
    except (TypeError, ValueError) as problem:
        raise ValueError(
            f"LLM: the sampling defaults in the files of {loaded.name}: {problem}"
        ) from None


def _reachable_eos(name: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    """The end-of-sequence ids that can be sampled; a file may name others by mistake."""
    unreachable = [token_id for token_id in ids if token_id >= vocab_size]
    if unreachable:
        _logger.warning(
            "%s: end-of-sequence ids %s are ignored; expected ids in [0, %d), the vocabulary",
            name,
            unreachable,
            vocab_size,
        )
    return [token_id for token_id in ids if token_id < vocab_size]


def _context(config: ModelConfig, max_context: int | None) -> int:
    if max_context is None:
        return config.max_position
    if max_context > config.max_position:
        raise ValueError(
            f"LLM: max_context {max_context}; expected at most the model's {config.max_position}"
        )
    return max_context


def check_errors(op: str, requests: Sequence[Request]) -> None:
    """Raise RuntimeError if the model gave a request no usable logits, or what else it met."""
    for place, request in enumerate(requests):
        if request.error is not None:
            raise request.error
        for sequence in request.sequences:
            if sequence.finish_reason == "error":
                raise RuntimeError(f"{op}: prompt {place}: {sequence.error}")
