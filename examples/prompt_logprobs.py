"""How likely a model finds each token of a text; nothing is generated."""

import math

from astrai import LLM, SamplingParams

TEXT = "The capital of France is Paris."

with LLM("smollm2-135m") as llm:
    (result,) = llm.generate(TEXT, SamplingParams(max_tokens=0, prompt_logprobs=1))
    total = 0.0
    for token_id, entry in zip(result.prompt_token_ids, result.prompt_logprobs, strict=True):
        if entry is None:  # nothing precedes the first token
            continue
        likeliest = max(entry, key=entry.get)
        total += entry[token_id]
        piece, other = llm.tokenizer.decode([token_id]), llm.tokenizer.decode([likeliest])
        print(f"{piece!r:12} {entry[token_id]:8.3f}   likeliest: {other!r}")

print(f"perplexity {math.exp(-total / (len(result.prompt_token_ids) - 1)):.2f}")
