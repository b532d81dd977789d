"""Checks, compiles and caches grammars for one tokenizer."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from astrai.sampling.structured_output import StructuredOutput
from astrai.structured.checker import GrammarChecker
from astrai.structured.grammar import OPTIONS, grammar_text, is_gbnf
from astrai.structured.matcher import GrammarMatcher
from astrai.structured.vocabulary import PieceSource, TokenizerWrapper, text_pieces

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiling a grammar may take this long in the child process; a usual one takes milliseconds.
CHECK_SECONDS = 5.0
CACHED_GRAMMARS = 32
# Bounds of llguidance. Its error messages would otherwise repeat the state of the parser.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_MAX_MESSAGE_CHARS = 300
# Where excerpts of the grammar or of llguidance's own state begin in a message.
_EXCERPT = re.compile(r"\n\s*\d+ \||\n<(?:non-verbose/|backtrace|state)>")
_POSITION = re.compile(r"^at \d+\(\d+\): ")


class CompiledGrammar:
    """A grammar that was checked, for one tokenizer; each sample gets a matcher of its own."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the beginning of an output."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Turns StructuredOutputs into grammars over one vocabulary. Safe to use from several threads.

    vocab_size   ids that exist both in the tokenizer and in the model
    control_ids  ids that are no text: special tokens and end-of-sequence ids
    """

    def __init__(
        self, tokenizer: PieceSource, vocab_size: int, control_ids: Collection[int]
    ) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._control_ids = frozenset(control_ids)
        # One compiles at a time; what is in the cache does not wait for it.
        self._lock = threading.Lock()
        self._cache_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._checker: GrammarChecker | None = None
        self._cache: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()

    def compile(self, output: StructuredOutput) -> CompiledGrammar:
        """The grammar of `output`; the 32 used last are kept.

        Raises ValueError for a schema, expression or grammar that is invalid, unsupported, that no
        output can satisfy, or that takes more than 5 seconds to compile.
        """
        compiled = self.cached(output)
        if compiled is not None:
            return compiled
        with self._lock:
            compiled = self.cached(output)  # another thread may have compiled it meanwhile
            if compiled is None:
                try:
                    compiled = self._compile(output)
                except ValueError as problem:
                    found = _shortened(problem, output.kind)
                    raise ValueError(
                        f"StructuredOutput: {output.kind} cannot be used: {found}; "
                        "expected a valid one that some text satisfies"
                    ) from None
                with self._cache_lock:
                    self._cache[output] = compiled
                    if len(self._cache) > CACHED_GRAMMARS:
                        self._cache.popitem(last=False)
            return compiled

    def cached(self, output: StructuredOutput) -> CompiledGrammar | None:
        """The grammar of `output` if it is known. Does not wait for one that is being compiled."""
        with self._cache_lock:
            compiled = self._cache.get(output)
            if compiled is not None:
                self._cache.move_to_end(output)
            return compiled

    def close(self) -> None:
        """End the child process, and with it what is being compiled, and forget all grammars."""
        checker = self._checker
        if checker is not None:
            checker.kill()
        with self._lock, self._cache_lock:
            if self._checker is not None:
                self._checker.close()
            self._tokenizer = self._checker = None
            self._cache.clear()

    def _compile(self, output: StructuredOutput) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer, checker = self._prepared()
        text = grammar_text(output)
        checked = checker.check(text, OPTIONS, output.kind == "grammar" and is_gbnf(text))
        matcher = LLMatcher(
            tokenizer, checked + OPTIONS, log_level=0, limits=LLParserLimits(**LIMITS)
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return CompiledGrammar(matcher, self._vocab_size)

    def _prepared(self) -> tuple[LLTokenizer, GrammarChecker]:
        """The vocabulary as llguidance holds it, and the child process with the same one."""
        from llguidance import LLTokenizer

        if self._tokenizer is None or self._checker is None:
            wrapper = TokenizerWrapper(
                text_pieces(self._source, self._vocab_size, self._control_ids)
            )
            slices = LLTokenizer.json_slices()
            # llguidance's stubs name its own wrapper class; any with these attributes will do.
            self._tokenizer = LLTokenizer(wrapper, slices=slices)  # type: ignore[arg-type]
            fields = {
                name: getattr(wrapper, name)
                for name in (
                    "tokens",
                    "eos_token_id",
                    "bos_token_id",
                    "special_token_ids",
                    "is_tokenizer_wrapper",
                )
            }
            setup = {"wrapper": fields, "slices": slices, "limits": LIMITS}
            self._checker = GrammarChecker(setup, CHECK_SECONDS)
        return self._tokenizer, self._checker


def _shortened(problem: ValueError, kind: str) -> str:
    """What llguidance says, without excerpts of the grammar and of its own stack."""
    message = str(problem).strip()
    if message.startswith("NoExtensionBias"):
        return "no text at all satisfies it"
    if "missing special token prefix" in message:
        return "it names a special token"
    message = _EXCERPT.split(message)[0]
    if kind != "grammar":  # the position is one in a grammar that the caller has not written
        message = _POSITION.sub("", message)
    message = " ".join(message.split())
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[: _MAX_MESSAGE_CHARS - 3] + "..."
    return message
