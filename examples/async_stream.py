"""Two answers written at the same time, and a third request that is cancelled half-way."""

import asyncio

from astrai import AsyncLLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


async def answer(llm, question):
    text = ""
    async for event in llm.stream([{"role": "user", "content": question}], GREEDY):
        text += event.text
    print(f"{question} -> {text!r}")


async def main():
    async with AsyncLLM("smollm2-135m") as llm:
        endless = asyncio.create_task(llm.generate("Once", SamplingParams(ignore_eos=True)))
        await asyncio.gather(answer(llm, "What is 2 + 2?"), answer(llm, "What is the sky?"))
        endless.cancel()
        await asyncio.wait([endless])
        print("cancelled:", endless.cancelled())


asyncio.run(main())
