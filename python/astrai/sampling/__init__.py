"""Choosing the next token: request parameters, the strategy pipeline, counter-based random numbers.

`SamplingParams` and `StructuredOutput` need no torch; everything else is imported on first use, so
that describing a request stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from astrai.sampling.params import SamplingParams
from astrai.sampling.structured_output import StructuredOutput

if TYPE_CHECKING:
    from astrai.sampling.bans import AllowedTokenIdsStrategy, BadWordsStrategy
    from astrai.sampling.batch_info import SamplingBatchInfo, SamplingRow
    from astrai.sampling.logprobs import TokenLogprobs
    from astrai.sampling.penalties import (
        FrequencyPenaltyStrategy,
        PresencePenaltyStrategy,
        RepetitionPenaltyStrategy,
    )
    from astrai.sampling.pipeline import SamplingPipeline
    from astrai.sampling.sampler import SampledTokens, Sampler
    from astrai.sampling.strategies import (
        LogitBiasStrategy,
        MinPStrategy,
        MinTokensStrategy,
        TemperatureStrategy,
        TopKStrategy,
        TopPStrategy,
    )
    from astrai.sampling.structured import StructuredOutputStrategy

_LAZY = {
    "AllowedTokenIdsStrategy": "bans",
    "BadWordsStrategy": "bans",
    "SamplingBatchInfo": "batch_info",
    "SamplingRow": "batch_info",
    "TokenLogprobs": "logprobs",
    "FrequencyPenaltyStrategy": "penalties",
    "PresencePenaltyStrategy": "penalties",
    "RepetitionPenaltyStrategy": "penalties",
    "SamplingPipeline": "pipeline",
    "SampledTokens": "sampler",
    "Sampler": "sampler",
    "LogitBiasStrategy": "strategies",
    "MinPStrategy": "strategies",
    "MinTokensStrategy": "strategies",
    "TemperatureStrategy": "strategies",
    "TopKStrategy": "strategies",
    "TopPStrategy": "strategies",
    "StructuredOutputStrategy": "structured",
}

__all__ = [
    "AllowedTokenIdsStrategy",
    "BadWordsStrategy",
    "FrequencyPenaltyStrategy",
    "LogitBiasStrategy",
    "MinPStrategy",
    "MinTokensStrategy",
    "PresencePenaltyStrategy",
    "RepetitionPenaltyStrategy",
    "SampledTokens",
    "Sampler",
    "SamplingBatchInfo",
    "SamplingParams",
    "SamplingPipeline",
    "SamplingRow",
    "StructuredOutput",
    "StructuredOutputStrategy",
    "TemperatureStrategy",
    "TokenLogprobs",
    "TopKStrategy",
    "TopPStrategy",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
