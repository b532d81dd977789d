"""Continue two texts in one batch; greedy, so the output is always the same."""

from astrai import LLM, SamplingParams

prompts = ["The capital of France is", "Water boils at"]

with LLM("smollm2-135m") as llm:
    results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16))

for result in results:
    print(f"{result.prompt!r} -> {result.outputs[0].text!r}")
