"""Whole-model decode on the CPU: astrai and transformers on the same SmolLM2 weights in bfloat16.

Both get the tensors of the same GGUF file, dequantised by astrai's reader, the same prompts and the
same number of threads. A decode rate is the difference between answers of 1 + N tokens and of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import seconds

PROMPT_TOKENS, NEW_TOKENS = 128, 64


def astrai_run(llm: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], float]:
    """Returns a function that gives tokens per second of one decode with astrai."""
    from astrai.sampling import SamplingParams

    def take(max_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return seconds(lambda: llm.generate(prompts, params))

    return lambda: len(prompts) * new_tokens / (take(1 + new_tokens) - take(1))


def transformers_run(model: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], float]:
    """Returns a function that gives tokens per second of one decode with transformers."""
    import torch

    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)

    def take(max_tokens: int) -> float:
        with torch.inference_mode():
            return seconds(
                lambda: model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    min_new_tokens=max_tokens,
                    max_new_tokens=max_tokens,
                )
            )

    return lambda: len(prompts) * new_tokens / (take(1 + new_tokens) - take(1))
