"""What one request asks of the sampler. No torch here: a client may build these cheaply."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from astrai.sampling.structured_output import StructuredOutput

# Below this a row is decided by argmax: (logit - max) / temperature would only tell apart logits
# that are closer than fp32 can represent for any real model.
GREEDY_TEMPERATURE = 1e-5
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
# Every stop string is looked for at every character of the output.
MAX_STOPS = 128
MAX_STOP_CHARS = 1024
# Every bad word is tokenised twice when the request is submitted.
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 1024
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Immutable and checked when built.

    Fields (a value outside the range raises ValueError, one of another type TypeError):

    temperature         default 1.0; finite, >= 0. Divides the logits. Below 1e-5 the row is greedy:
                        the largest logit wins, the lowest id of equal ones.
    top_p               default 1.0; in [0, 1]. Keep the smallest set of most likely tokens whose
                        probabilities sum to at least top_p; always at least one, so 0 keeps one.
    top_k               default 0; >= -1. Keep the k most likely tokens; 0, -1 and anything at
                        or above the vocabulary size mean no limit.
    min_p               default 0.0; in [0, 1]. Drop tokens below min_p times the likeliest one.
    frequency_penalty   default 0.0; in [-2, 2]. Subtracted from a token's logit once for each time
                        it stands in the output. The prompt does not count.
    presence_penalty    default 0.0; in [-2, 2]. Subtracted once if the token stands in the output.
                        The prompt does not count.
    repetition_penalty  default 1.0; in [0.001, 1000]. Divides positive and multiplies negative
                        logits of tokens in the prompt or the output (Keskar et al. 2019,
                        arXiv:1909.05858).
    seed                default None; any 64-bit signed integer. The same seed gives the same tokens
                        whatever else is in the batch; None draws a fresh one for each request.
    n                   default 1; 1 to 128. Independent samples of the same prompt.
    best_of             default None, which means n; n to 128. Generate this many samples and return
                        the n with the largest cumulative log probability, the largest first. The
                        sum is under the model's own distribution and not divided by the length.
                        Not with streaming if larger than n.
    max_tokens          default 256 tokens; >= 0, or None for up to the end of the context.
                        A number beyond the context is cut to it; 0 generates nothing.
    min_tokens          default 0 tokens; 0 to max_tokens. Until this many are out, the
                        end-of-sequence and stop ids cannot be chosen and stop strings do not match.
    stop                default (); a string or several, none empty, at most 128 of at most 1024
                        characters. Generation ends when the output text contains one; the text
                        ends before it.
    stop_token_ids      default (); ids in [0, vocabulary). Generation ends when one is chosen.
    ignore_eos          default False. Treat the model's end-of-sequence ids as ordinary tokens.
    logit_bias          default None; id -> number in [-100, 100], added to that token's logit.
                        Ids are checked against the vocabulary when the request is submitted.
    allowed_token_ids   default None, which means all; else at least one id in [0, vocabulary).
                        No other id can be chosen, end-of-sequence and stop ids included.
    bad_words           default (); a string or several, none empty, at most 1024 of at most 1024
                        characters. The output never holds their tokens, each word taken with and
                        without a space before it: the last token is ruled out where the output
                        ends with those before it. The prompt does not count.
    logprobs            default None; 0 to 20. Report the natural log probability of each chosen
                        token and of this many likeliest ones, under the model's own distribution
                        (before penalties, bias, temperature and filters).
    prompt_logprobs     default None; 0 to 20. Report the same for each token of the prompt but the
                        first. The whole prompt is computed then, cached or not, and with
                        max_tokens 0 too.
    structured          default None; a StructuredOutput: the form that the output has. Tokens that
                        would break it cannot be chosen.
    skip_special_tokens default True. Leave special tokens out of the text.
    include_stop_str_in_output
                        default False. End the text after the stop string or token, not before it.

    Order of effects: repetition, frequency and presence penalty, logit bias, allowed_token_ids,
    bad_words, min_tokens, structured, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Iterable[int] | None = None
    bad_words: str | Iterable[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_bans()
        self._check_logit_bias()
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise TypeError(
                f"SamplingParams: structured is {self.structured!r:.60}; "
                "expected a StructuredOutput or None"
            )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"SamplingParams: {name} is {value!r}; expected True or False")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _number(self, name: str, rule: str) -> float:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"SamplingParams: {name} is {value!r}; expected {rule}")
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"SamplingParams: {name} is {value!r}; expected {rule}") from None

    def _check_numbers(self) -> None:
        ranges: dict[str, tuple[float, float, str]] = {
            "temperature": (0.0, math.inf, "a finite number >= 0"),
            "top_p": (0.0, 1.0, "a number in [0, 1]"),
            "min_p": (0.0, 1.0, "a number in [0, 1]"),
            "frequency_penalty": (-2.0, 2.0, "a number in [-2, 2]"),
            "presence_penalty": (-2.0, 2.0, "a number in [-2, 2]"),
            "repetition_penalty": (1e-3, 1e3, "a number in [0.001, 1000]"),
        }
        for name, (low, high, rule) in ranges.items():
            value = self._number(name, rule)
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"SamplingParams: {name} is {value!r}; expected {rule}")
            self._set(name, value)

    def _integer(self, name: str, low: int, high: int, rule: str, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"SamplingParams: {name} is {value!r}; expected {rule}")
        if not low <= value <= high:
            raise ValueError(f"SamplingParams: {name} is {value}; expected {rule}")

    def _check_lengths(self) -> None:
        big = _INT64_MAX
        self._integer("top_k", -1, big, "an integer >= 1, or 0 or -1 for no limit")
        self._integer("seed", _INT64_MIN, big, "a 64-bit signed integer or None", optional=True)
        self._integer("n", 1, MAX_SAMPLES, f"an integer in [1, {MAX_SAMPLES}]")
        self._integer("max_tokens", 0, big, "an integer >= 0 or None", optional=True)
        self._integer("min_tokens", 0, big, "an integer >= 0")
        samples = f"None or an integer from n ({self.n}) to {MAX_SAMPLES}"
        self._integer("best_of", self.n, MAX_SAMPLES, samples, optional=True)
        counts = f"an integer in [0, {MAX_LOGPROBS}] or None"
        self._integer("logprobs", 0, MAX_LOGPROBS, counts, optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, counts, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams: min_tokens is {self.min_tokens}; "
                f"expected at most max_tokens ({self.max_tokens})"
            )

    @staticmethod
    def _sequence(name: str, value: Iterable[Any], rule: str) -> tuple[Any, ...]:
        try:
            return tuple(value)
        except TypeError:
            raise TypeError(f"SamplingParams: {name} is {value!r}; expected {rule}") from None

    def _texts(self, name: str) -> tuple[str, ...]:
        value = getattr(self, name)
        value = (value,) if isinstance(value, str) else value
        texts = self._sequence(name, value, "a string or strings")
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"SamplingParams: {name} has {text!r}; expected strings")
            if not text:
                raise ValueError(f"SamplingParams: {name} has an empty string; expected text")
        return texts

    def _token_ids(self, name: str) -> tuple[int, ...]:
        ids = self._sequence(name, getattr(self, name), "token ids")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TypeError(f"SamplingParams: {name} has {token_id!r}; expected integers")
            if token_id < 0:
                raise ValueError(f"SamplingParams: {name} has {token_id}; expected ids >= 0")
        return ids

    def _limited_texts(self, name: str, max_count: int, max_chars: int) -> tuple[str, ...]:
        """As _texts: at most max_count of at most max_chars characters."""
        texts = self._texts(name)
        if len(texts) > max_count:
            raise ValueError(
                f"SamplingParams: {name} has {len(texts)} strings; expected at most {max_count}"
            )
        longest = max((len(text) for text in texts), default=0)
        if longest > max_chars:
            raise ValueError(
                f"SamplingParams: {name} has a string of {longest} characters; "
                f"expected at most {max_chars}"
            )
        return texts

    def _check_stops(self) -> None:
        self._set("stop", self._limited_texts("stop", MAX_STOPS, MAX_STOP_CHARS))
        self._set("stop_token_ids", self._token_ids("stop_token_ids"))

    def _check_bans(self) -> None:
        words = self._limited_texts("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        self._set("bad_words", words)
        if self.allowed_token_ids is not None:
            ids = tuple(sorted(set(self._token_ids("allowed_token_ids"))))
            if not ids:
                raise ValueError(
                    "SamplingParams: allowed_token_ids is empty; expected at least one id or None"
                )
            self._set("allowed_token_ids", ids)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(
                f"SamplingParams: logit_bias is {self.logit_bias!r}; expected a mapping id -> bias"
            )
        bias: dict[int, float] = {}
        for token_id, value in self.logit_bias.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TypeError(f"SamplingParams: logit_bias has key {token_id!r}; expected an id")
            if token_id < 0:
                raise ValueError(f"SamplingParams: logit_bias has id {token_id}; expected ids >= 0")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(
                    f"SamplingParams: logit_bias[{token_id}] is {value!r}; expected a number"
                )
            if not -100.0 <= value <= 100.0:
                raise ValueError(
                    f"SamplingParams: logit_bias[{token_id}] is {value}; "
                    "expected a number in [-100, 100]"
                )
            bias[token_id] = float(value)
        self._set("logit_bias", MappingProxyType(bias) if bias else None)

    def __hash__(self) -> int:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.logit_bias is not None:
            values["logit_bias"] = frozenset(self.logit_bias.items())
        return hash(tuple(values.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.logit_bias is not None:
            values["logit_bias"] = dict(self.logit_bias)  # a proxy cannot be pickled
        return partial(SamplingParams, **values), ()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError naming the first id outside a vocabulary of `vocab_size` ids."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(
                        f"SamplingParams: {name} has id {token_id}; "
                        f"expected ids in [0, {vocab_size}), the model's vocabulary"
                    )

    @property
    def is_greedy(self) -> bool:
        """True when the largest logit always wins."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_samples(self) -> int:
        """Samples that are generated; n of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @cached_property
    def allowed_ids_array(self) -> array[int]:
        """allowed_token_ids as 64-bit integers, made once however often a batch changes."""
        return array("q", self.allowed_token_ids or ())

    @property
    def needs_logprobs(self) -> bool:
        """True when the log probability of each chosen token is wanted, to report or to rank."""
        return self.logprobs is not None or self.num_samples > self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        return self.stop  # type: ignore[return-value]  # normalised by _check_stops
