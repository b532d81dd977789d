"""What requests share: a system prompt is computed once, and tenants do not see each other's."""

from astrai import LLM, SamplingParams

SYSTEM = "You are a guide in a museum of science. Answer in one short sentence. " * 6
PARAMS = SamplingParams(temperature=0, max_tokens=12)

with LLM("smollm2-135m") as llm:
    for question in ("What is a star?", "What is a planet?", "What is a comet?"):
        (result,) = llm.generate(SYSTEM + question, PARAMS)
        metrics = result.metrics
        print(f"{metrics.cached_tokens:3} of {metrics.prompt_tokens} tokens were cached")
    (result,) = llm.generate(SYSTEM + "What is a star?", PARAMS, cache_salt="another tenant")
    print(f"{result.metrics.cached_tokens:3} of them for another tenant")
