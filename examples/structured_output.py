"""Ask for JSON that fits a schema: every answer can be parsed."""

import json

from astrai import LLM, SamplingParams, StructuredOutput

city = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "is_capital"],
    "additionalProperties": False,
}
params = SamplingParams(
    temperature=0.0, max_tokens=128, structured=StructuredOutput(json_schema=city)
)

with LLM("smollm2-135m") as llm:
    results = llm.generate(["Paris as JSON: ", "Oslo as JSON: "], params)

for result in results:
    print(json.loads(result.outputs[0].text))
