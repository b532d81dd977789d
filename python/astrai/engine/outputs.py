"""What the engine hands back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# stop: a stop string, stop id or end-of-sequence id was reached, or a structured output is
# complete. length: max_tokens or the end of the context. abort: the request was aborted. error: the
# model gave no usable logits, or the request's parameters ruled out every token.
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sample.

    index          place among the request's n samples; with best_of, the best one is 0
    text           what was generated, without the stop string or token unless asked for
    token_ids      every generated id, that of the stop token included
    finish_reason  why it ended
    stop_reason    the stop string or id that ended it; None for another finish reason
    logprobs       one {id: natural log probability} for each token, the chosen id first, then the
                   likeliest; None unless SamplingParams.logprobs asked for them
    cumulative_logprob  sum of the natural log probabilities of token_ids under the model's own
                   distribution; None unless logprobs or a best_of above n asked for it
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Counts and times of one request.

    prompt_tokens          tokens of the prompt, counted once however many samples were asked for
    cached_tokens          tokens of the prompt whose keys and values were found in the cache when
                           the request first started
    output_tokens          generated tokens of all samples, those that best_of drops included
    time_to_first_token_s  seconds from submission to the first token; None if there was none
    decode_tokens_per_s    tokens after each sample's first, by the seconds from the first token of
                           the request to its last; None when there were no such tokens
    preemptions            how often a sample lost its pages and was computed again
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    time_to_first_token_s: float | None
    decode_tokens_per_s: float | None
    preemptions: int


@dataclass(frozen=True)
class RequestOutput:
    """The finished answer to one prompt.

    request_id        the caller's name for the request, or its number in the engine
    prompt            the text that was given or rendered; None when token ids were given
    prompt_token_ids  what the model saw
    outputs           n samples, in order of index
    prompt_logprobs   for each token of the prompt {id: natural log probability}, its own id first,
                      then the likeliest; None for the first token, which nothing precedes, and for
                      those not yet computed when the request was aborted. None as a whole unless
                      SamplingParams.prompt_logprobs asked for them
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, float] | None] | None = None


@dataclass(frozen=True)
class StreamEvent:
    """One step of one sample while it is generated.

    text           new text; may be empty while a character or a possible stop string is incomplete
    token_ids      the new token (none in the one event of a request that generates nothing, or
                   when a sample ends without a token)
    index          which of the n samples
    finish_reason  None until the sample's last event
    stop_reason    as in CompletionOutput
    logprobs       as in CompletionOutput, for the new token
    prompt_logprobs  as in RequestOutput, on the first event of the request alone
    """

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
