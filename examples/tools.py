"""A model that has to call a function of this program, with arguments that follow the function's schema.

pip install openai
distmk serve MODEL
python examples/tools.py
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str, unit: str) -> str:
    return f"{city}: {'18' if unit == 'celsius' else '64'} degrees, rain"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000/v1")
    client = OpenAI(base_url=parser.parse_args().url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "Do I need an umbrella in Paris?"}]
    forced: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    asked = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], **forced).choices[0].message
    messages.append(asked.to_dict())
    for call in asked.tool_calls or []:
        assert call.type == "function"
        weather = get_weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) -> {weather}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": weather})
    answer = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], max_tokens=200)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
