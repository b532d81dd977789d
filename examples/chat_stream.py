"""Ask a chat model and print its answer as it is written.

Usage: chat_stream.py [MODEL]    an alias, a .gguf file or a Hugging Face directory
"""

import sys

from astrai import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
messages = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]

with LLM(model) as llm:
    for event in llm.stream(messages, SamplingParams(temperature=0.0, max_tokens=48)):
        print(event.text, end="", flush=True)
    print()
