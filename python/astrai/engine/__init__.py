"""The engine: requests in, tokens and text out.

    llm         LLM: generate, chat, stream
    async_llm   AsyncLLM: the same for event loops
    engine_thread, ticket   the thread that steps for them; what one coroutine sees of it
    errors      why AsyncLLM did not answer
    prompts     checks prompts, works out their limits
    bans        bad words as token ids
    prompt_scores  log probabilities of a prompt's tokens
    request     a prompt and its samples while they are generated
    scheduler   which sequences run next, who owns the pages
    executor    runs the model over a batch
    core        the step loop
    detokenizer, stop, text   token ids to text that may be shown
    outputs     what callers get back
    sizing      default number of KV pages
    interrupt   Ctrl-C between steps, not inside them

Output types and errors need no torch; everything else is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from astrai.engine.errors import EngineBusyError, EngineClosedError, EngineStepError
from astrai.engine.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    StreamEvent,
)

if TYPE_CHECKING:
    from astrai.engine.async_llm import AsyncLLM
    from astrai.engine.core import EngineCore, EngineStats
    from astrai.engine.detokenizer import Detokenizer
    from astrai.engine.executor import Executor
    from astrai.engine.llm import LLM
    from astrai.engine.scheduler import ScheduledBatch, Scheduler
    from astrai.engine.stop import StopMatcher

_LAZY = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Detokenizer": "detokenizer",
    "EngineCore": "core",
    "EngineStats": "core",
    "Executor": "executor",
    "ScheduledBatch": "scheduler",
    "Scheduler": "scheduler",
    "StopMatcher": "stop",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Detokenizer",
    "EngineBusyError",
    "EngineClosedError",
    "EngineCore",
    "EngineStats",
    "EngineStepError",
    "Executor",
    "FinishReason",
    "RequestMetrics",
    "RequestOutput",
    "ScheduledBatch",
    "Scheduler",
    "StopMatcher",
    "StreamEvent",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
