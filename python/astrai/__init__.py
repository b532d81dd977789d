"""astrai: a language-model inference runtime, a C++ core under thin Python.

    from astrai import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

Names are loaded on first use: `import astrai` alone imports neither torch nor the compiled module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astrai.attention import ATTN_BACKEND, apply_rotary_emb, attn_backend
    from astrai.config import EngineConfig, ModelConfig
    from astrai.engine.async_llm import AsyncLLM
    from astrai.engine.llm import LLM
    from astrai.extension import ops
    from astrai.extension.lib import _ext
    from astrai.kv_cache import KVCache, PagePool
    from astrai.sampling import SamplingParams, StructuredOutput
    from astrai.workspace import InferenceWorkspace, WorkspaceShape

    counters = _ext.counters
    reset_counters = _ext.reset_counters
    __version__: str

# Public name -> module that defines it.
_SOURCES = {
    "ATTN_BACKEND": "astrai.attention",
    "AsyncLLM": "astrai.engine.async_llm",
    "EngineConfig": "astrai.config",
    "InferenceWorkspace": "astrai.workspace",
    "KVCache": "astrai.kv_cache",
    "LLM": "astrai.engine.llm",
    "ModelConfig": "astrai.config",
    "PagePool": "astrai.kv_cache",
    "SamplingParams": "astrai.sampling",
    "StructuredOutput": "astrai.sampling",
    "WorkspaceShape": "astrai.workspace",
    "apply_rotary_emb": "astrai.attention",
    "attn_backend": "astrai.attention",
}

__all__ = [
    "ATTN_BACKEND",
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "InferenceWorkspace",
    "KVCache",
    "ModelConfig",
    "PagePool",
    "SamplingParams",
    "StructuredOutput",
    "WorkspaceShape",
    "__version__",
    "apply_rotary_emb",
    "attn_backend",
    "counters",
    "ops",
    "reset_counters",
]


def __getattr__(name: str) -> Any:
    if name == "ops":
        value: Any = importlib.import_module("astrai.extension.ops")
    elif name == "__version__":
        value = _version()
    elif name in ("counters", "reset_counters"):
        from astrai.extension.loader import load

        value = getattr(load(), name)
    elif name in _SOURCES:
        value = getattr(importlib.import_module(_SOURCES[name]), name)
    else:
        raise AttributeError(f"module 'astrai' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("astrai")
    except metadata.PackageNotFoundError:  # run from a source tree
        from astrai.extension.loader import load

        return str(load().__version__)
