"""`LLM.chat`: conversations through the template, as prompts of the same engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.chat_model import write_chat_model
from support.chat_templates import CHATML

from distmk import LLM, ChatPrompt, SamplingParams
from distmk.errors import UsageError

PARAMS = SamplingParams(max_tokens=4)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_chat(tmp_path: Path, tiny_model: Path) -> None:
    with LLM(str(write_chat_model(tmp_path / "model", CHATML)), num_workers=1) as llm:
        text = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        ids = llm.render_chat(user("Hi"))
        (answer,) = llm.chat(user("Hi"), PARAMS)
        assert (answer.prompt, answer.prompt_token_ids) == (text, ids) and 256 not in ids
        assert answer.outputs[0].token_ids == llm.generate([ids], PARAMS)[0].outputs[0].token_ids
        several = llm.chat([user("Hi"), user("Bye")], PARAMS)
        assert [output.prompt for output in several] == [text, text.replace("Hi", "Bye")]
        assert several[0].outputs[0].token_ids == answer.outputs[0].token_ids
        streamed = list(llm.stream([ChatPrompt(user("Hi")), "text", ids], PARAMS))
        for index in (0, 2):
            assert [token.token_id for token in streamed if token.index == index] == answer.outputs[0].token_ids
        own = llm.chat(user("Hi"), PARAMS, chat_template="{{ x }}", chat_template_kwargs={"x": "abc"})
        assert own[0].prompt == "abc" and own[0].prompt_token_ids == llm.render_chat(user("Hi"), chat_template="abc")
        tool = {"type": "function", "function": {"name": "f"}}
        (called,) = llm.chat(user("Hi"), PARAMS, chat_template="{{ tools | tojson }}", tools=[tool])
        assert called.prompt == '[{"type": "function", "function": {"name": "f"}}]'
        for call, complaint in (
            (lambda: llm.chat([*user("Hi"), {"role": "robot"}]), "message 1 has the role 'robot'"),
            (lambda: llm.chat([user("Hi"), [{"role": "robot"}]]), "message 0 has the role 'robot'"),
            (lambda: llm.chat("Hi"), "the messages are 'Hi'; expected a list of messages"),  # type: ignore[arg-type]
            (lambda: llm.chat(user("x" * 400)), "leaves no room in a context of 400"),
            (lambda: llm.chat(user("Hi"), chat_template=""), "a prompt has no tokens"),
            (lambda: llm.chat(user("Hi"), tools=[{}]), "tools has {} as tools"),
        ):
            with pytest.raises(UsageError, match=complaint):
                call()
    with LLM(str(tiny_model), num_workers=1) as llm, pytest.raises(UsageError, match="has no tokenizer"):
        llm.chat(user("Hi"))
