"""Chat templates in the manner of published ones, and random conversations."""

from __future__ import annotations

from typing import Any

import numpy as np

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and messages[0].role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{% if not date_string is defined %}
    {% set date_string = strftime_now("%Y") %}
{% endif %}
{% if messages[0]['role'] == 'system' %}
    {% set system_message = messages[0]['content'] | trim %}
    {% set messages = messages[1:] %}
{% else %}
    {% set system_message = "" %}
{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{% for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{% endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant!") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' -}}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}{%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- macro header(role) %}<|im_start|>{{ role }}{{ '\\n' }}{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- header('assistant') }}{% generation %}
        {%- if loop.index0 > ns.last_query_index %}{{- '<think>\\n' ~ reasoning ~ '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' ~ call.function.arguments | tojson(indent=2) ~ '</tool_call>' }}
        {%- endfor %}{% endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- header('user') }}{%- endif %}
        {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if not loop.last and loop.nextitem.role == "tool" %}{%- continue %}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- header(message.role) + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "qwen3": QWEN3}

_PIECES = (
    *(
        "Hello",
        " ",
        "\n",
        "  two",
        "</think>\n",
        "<think>",
        "<b>&\"'",
        "é漢🙂",
        "<|im_end|>",
        "<s>",
        "{{ x }}",
        "{%",
        "\t",
        "1234",
    ),
    "\u2028",
)


def random_text(rng: np.random.Generator) -> str:
    return "".join(rng.choice(_PIECES) for _ in range(rng.integers(0, 6)))


def random_conversation(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Mostly user and assistant in turn; at times a system message, a repeated role, reasoning, tool calls and answers."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": random_text(rng)})
    for turn in range(rng.integers(1, 6)):
        role = ("user", "assistant")[turn % 2] if rng.random() < 0.9 else str(rng.choice(["user", "assistant", "tool"]))
        message: dict[str, Any] = {"role": role, "content": random_text(rng)}
        if role == "assistant" and rng.random() < 0.3:
            message[str(rng.choice(["reasoning_content", "reasoning", "thinking"]))] = random_text(rng)
        if role == "assistant" and rng.random() < 0.3:
            arguments = {"text": random_text(rng), "number": int(rng.integers(9)), "list": [1.5, None, True]}
            message["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
            message["refusal"] = None
        messages.append(message)
    return messages
