"""A request that is more urgent runs at once; the one that gave way says the same in the end."""

from astrai import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

with LLM("smollm2-135m", max_batch=1, deterministic=True) as llm:
    (alone,) = llm.generate("The history of Rome begins", PARAMS)
    story = llm.stream("The history of Rome begins", PARAMS, priority=1)
    text = next(story).text
    (urgent,) = llm.generate("The capital of France is", PARAMS, priority=0)
    print("urgent:", urgent.outputs[0].text.split(".")[0])
    text += "".join(event.text for event in story)
    print("preemptions:", llm.stats().preemptions, " same text:", text == alone.outputs[0].text)
