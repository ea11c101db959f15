"""Answers that follow a JSON schema: each is parsed without a try.

python examples/schema.py MODEL --ranks 2
"""

from __future__ import annotations

import argparse
import json

from distmk import LLM, SamplingParams, StructuredOutputsParams, run_main

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "is_capital": {"type": "boolean"},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "country", "is_capital", "sights"],
    "additionalProperties": False,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a Hugging Face folder or a GGUF file, with a chat template")
    parser.add_argument("--ranks", type=int, help="processes to start here, when there is no launcher")
    parser.add_argument("--backend", choices=("auto", "host", "cuda", "emulated"), default="auto")
    arguments = parser.parse_args()
    format_of_cities = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    with LLM(arguments.model, tensor_parallel_size=arguments.ranks, backend=arguments.backend) as llm:
        params = SamplingParams(max_tokens=300)
        conversations = [[{"role": "user", "content": f"Describe {city}."}] for city in ("Paris", "Kyoto")]
        for output in llm.chat(conversations, params, response_format=format_of_cities):
            city = json.loads(output.outputs[0].text)
            print(f"{city['name']} in {city['country']}: {', '.join(city['sights'])}")
        verdict = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["positive", "negative"]))
        for output in llm.generate(["The review 'I loved it' is"], verdict):
            print(output.prompt, output.outputs[0].text)
    return 0


if __name__ == "__main__":
    run_main(main)
