"""Checks prompts and turns them into requests, before anything is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from astrai.engine.bans import bad_word_ids, check_some_token_is_left
from astrai.sampling.params import SamplingParams

if TYPE_CHECKING:
    from astrai.structured.compiler import CompiledGrammar, GrammarCompiler
    from astrai.tokenizer import ChatTemplate, Tokenizer

Prompt = str | list[int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that the engine can serve, with the limits in force for it."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    bad_ids: tuple[tuple[int, ...], ...] = ()
    grammar: CompiledGrammar | None = None


@dataclass(frozen=True)
class PromptLimits:
    """What bounds a prompt.

    vocab_size   ids that exist both in the tokenizer and in the model
    max_context  tokens of prompt and output together
    num_pages    pages of the pool, each of page_size tokens
    """

    vocab_size: int
    max_context: int
    num_pages: int
    page_size: int


class PromptReader:
    """Tokenises and checks prompts against the limits of one engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        eos_token_ids: Sequence[int],
        limits: PromptLimits,
        grammars: GrammarCompiler,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = limits
        self._grammars = grammars

    def read(self, where: str, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
        """Check a text or a list of token ids; `where` begins every error message."""
        if isinstance(prompt, str):
            return self._prepare(where, prompt, self._tokenizer.encode(prompt), params)
        return self._prepare(where, None, self._check_ids(where, prompt), params)

    def read_chat(
        self,
        where: str,
        messages: Sequence[Message],
        params: SamplingParams,
        template_values: Mapping[str, Any],
    ) -> PreparedPrompt:
        """Render a conversation with the model's chat template and check it."""
        if not isinstance(messages, (list, tuple)) or not is_conversation(messages):
            raise TypeError(f"{where} is {messages!r}; expected a list of messages")
        values = {"add_generation_prompt": True, **template_values}
        text = self._chat_template.render(list(messages), **values)
        # The template writes the special tokens itself.
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self._prepare(where, text, token_ids, params)

    def read_one(
        self,
        op: str,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams,
        template_values: Mapping[str, Any],
    ) -> PreparedPrompt:
        """Check one prompt, or render and check one conversation."""
        if is_conversation(prompt):
            return self.read_chat(
                f"{op}: conversation",
                prompt,  # type: ignore[arg-type]  # is_conversation has looked
                params,
                template_values,
            )
        # No conversation, so a prompt: read_prompt refuses what is neither.
        return self.read_prompt(op, prompt, params)  # type: ignore[arg-type]

    def read_prompt(self, op: str, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
        """Check what should be one text or list of token ids."""
        prompts = split_prompts(op, prompt)
        if len(prompts) != 1:
            raise ValueError(f"{op}: {len(prompts)} prompts; expected one")
        return self.read(f"{op}: prompt", prompts[0], params)

    def _check_ids(self, where: str, ids: Sequence[int]) -> list[int]:
        vocab_size = self._limits.vocab_size
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TypeError(f"{where} has {token_id!r}; expected token ids")
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{where} has token id {token_id}; expected ids in [0, {vocab_size})"
                )
        return list(ids)

    def _prepare(
        self, where: str, text: str | None, token_ids: list[int], params: SamplingParams
    ) -> PreparedPrompt:
        limits, length = self._limits, len(token_ids)
        if length == 0 or text == "":
            raise ValueError(f"{where} is empty; expected at least one token")
        if length + 1 > limits.max_context:
            raise ValueError(
                f"{where} has {length} tokens, with one to generate {length + 1}; "
                f"expected at most the context's {limits.max_context}"
            )
        params.check_vocabulary(limits.vocab_size)
        stop_ids = self._stop_ids(params)
        bad_ids = bad_word_ids(where, params.bad_words, self._tokenizer, limits.vocab_size)
        check_some_token_is_left(where, params, bad_ids, stop_ids, limits.vocab_size)
        return PreparedPrompt(
            text=text,
            token_ids=token_ids,
            params=params,
            max_new_tokens=self._room(where, length, params),
            stop_ids=stop_ids,
            bad_ids=bad_ids,
            grammar=self._grammar(where, params),
        )

    def _grammar(self, where: str, params: SamplingParams) -> CompiledGrammar | None:
        if params.structured is None:
            return None
        try:
            return self._grammars.compile(params.structured)
        except ValueError as problem:
            raise ValueError(f"{where}: {problem}") from None

    def _room(self, where: str, length: int, params: SamplingParams) -> int:
        """Tokens that may be generated. The last one is never stored, so it needs no page."""
        limits = self._limits
        pool_tokens = limits.num_pages * limits.page_size
        context_room = limits.max_context - length
        if length > pool_tokens:
            raise ValueError(
                f"{where} has {length} tokens, {-(-length // limits.page_size)} pages of "
                f"{limits.page_size}; expected at most the pool's {limits.num_pages}"
            )
        if params.max_tokens is None:
            return min(context_room, pool_tokens + 1 - length)
        wanted = min(params.max_tokens, context_room)
        stored = length + max(wanted - 1, 0)
        if stored > pool_tokens:
            raise ValueError(
                f"{where} has {length} tokens and may generate {wanted}, "
                f"{-(-stored // limits.page_size)} pages of {limits.page_size} tokens; "
                f"expected at most the pool's {limits.num_pages}: "
                "give a smaller max_tokens or more num_pages"
            )
        return wanted

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            ids |= self._eos_token_ids
        if params.skip_special_tokens:
            # A special token never shows in the text, so a stop string that spells one could
            # never match: stop at its id, if the model can give it.
            for stop in params.stop_strings:
                spelled = self._tokenizer.encode(stop, add_special_tokens=False)
                is_special = len(spelled) == 1 and spelled[0] in self._tokenizer.special_ids
                if is_special and spelled[0] < self._limits.vocab_size:
                    ids.add(spelled[0])
        return frozenset(ids)


def is_conversation(value: object) -> bool:
    """True for a list whose first entry is a message."""
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def check_messages(op: str, messages: object) -> None:
    """Raise unless this is a list that has something in it; `op` begins the error message."""
    if not messages:
        raise ValueError(f"{op}: messages is empty; expected at least one message")
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"{op}: messages is a {type(messages).__name__}; expected a list")


def split_prompts(op: str, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts; `op` begins every error message."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(
            f"{op}: prompts is {type(prompts).__name__}; "
            "expected a text, a list of token ids, or a list of these"
        )
    if not prompts:
        raise ValueError(f"{op}: prompts is empty; expected at least one prompt")
    if all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    for i, item in enumerate(prompts):
        if not isinstance(item, (str, list, tuple)):
            raise TypeError(
                f"{op}: prompt {i} is {type(item).__name__}; expected a text or a list of token ids"
            )
    # The loop above has looked at every item.
    return [item if isinstance(item, str) else list(item) for item in prompts]  # type: ignore[arg-type]


def check_streamable(op: str, params: SamplingParams) -> None:
    """Raise ValueError for parameters whose samples are chosen only when all have ended."""
    if params.num_samples > params.n:
        raise ValueError(
            f"{op}: best_of is {params.best_of} with n {params.n}; expected best_of None or equal "
            "to n: which samples are the best is known at the end"
        )


def params_for_each(
    op: str,
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: SamplingParams,
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts: one for all, or one each."""
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)) or not all(
        isinstance(item, SamplingParams) for item in params
    ):
        raise TypeError(
            f"{op}: sampling_params is {params!r}; expected SamplingParams, a list of them or None"
        )
    if len(params) != count:
        raise ValueError(
            f"{op}: sampling_params has {len(params)} entries; expected one for each of the "
            f"{count} prompts"
        )
    return list(params)
