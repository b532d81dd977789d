"""Choose among samples, rule words out and repeat it all with a seed."""

from astrai import LLM, SamplingParams

PROMPT = "The capital of France is"

with LLM("smollm2-135m") as llm:
    # The three likeliest of eight samples, best first.
    params = SamplingParams(seed=7, n=3, best_of=8, temperature=0.8, max_tokens=8)
    (result,) = llm.generate(PROMPT, params)
    for sample in result.outputs:
        print(f"{sample.index}: {sample.cumulative_logprob:8.3f} {sample.text!r}")
    (again,) = llm.generate(PROMPT, params)
    print("the same seed gives the same samples:", again.outputs == result.outputs)

    # The output never holds these words.
    greedy = SamplingParams(temperature=0.0, max_tokens=8, bad_words=["Paris", "located"])
    print(f"without Paris: {llm.generate(PROMPT, greedy)[0].outputs[0].text!r}")
