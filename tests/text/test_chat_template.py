"""Chat templates against transformers' `apply_chat_template`, where they are found, and how mistakes are told."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from support.chat_model import write_tokenizer
from support.chat_templates import CHATML, TEMPLATES, random_conversation
from transformers import AutoTokenizer

from distmk.errors import ModelError, UsageError
from distmk.text.chat.files import MAX_TEMPLATE_BYTES
from distmk.text.chat.messages import ChatPrompt
from distmk.text.chat.render import ChatRenderer
from distmk.text.tokenizer import load_tokenizer
from distmk.weights import open_checkpoint

USER = [{"role": "user", "content": "Hi"}]


def renderer_of(path: Path) -> ChatRenderer:
    checkpoint: Any = SimpleNamespace(path=path)
    return ChatRenderer(checkpoint, load_tokenizer(checkpoint))


@pytest.fixture
def renderer(tmp_path: Path) -> ChatRenderer:
    return renderer_of(write_tokenizer(tmp_path / "model", CHATML))


def outcome(render: Any, *args: Any, **kwargs: Any) -> Any:
    """What a call returns, or None if it raises."""
    try:
        return render(*args, **kwargs)
    except Exception:
        return None


def test_same_as_transformers(tmp_path: Path, rng: np.random.Generator) -> None:
    """Text and ids of random conversations; a conversation that one refuses, the other refuses as well."""
    named = [{"name": name, "template": template} for name, template in TEMPLATES.items()]
    folder = write_tokenizer(tmp_path / "model", named)
    hf, mine = AutoTokenizer.from_pretrained(folder), renderer_of(folder)
    num_rendered = dict.fromkeys(TEMPLATES, 0)
    for _ in range(60):
        messages = random_conversation(rng)
        for name in TEMPLATES:
            options: dict[str, Any] = {"add_generation_prompt": bool(rng.integers(2)), "chat_template": name}
            if not options["add_generation_prompt"] and rng.random() < 0.3:
                options["continue_final_message"] = True
            extra = {"enable_thinking": False, "tools": [{"a<": ["é", 1]}]} if rng.random() < 0.3 else {}
            want = outcome(hf.apply_chat_template, messages, tokenize=False, **options, **extra)
            got = outcome(mine.render, ChatPrompt(messages, chat_template_kwargs=extra, **options))
            assert (got and got.text) == want, (name, messages, options, extra)
            if got:
                assert got.token_ids == hf(want, add_special_tokens=False)["input_ids"], (name, messages)
                num_rendered[name] += 1
    assert min(num_rendered.values()) > 10, num_rendered


def test_tools(tmp_path: Path) -> None:
    """A round of calls is rendered as by transformers, which takes arguments as objects; `strict` is not for the model."""
    folder = write_tokenizer(tmp_path / "model", TEMPLATES["qwen3"])
    hf, mine = AutoTokenizer.from_pretrained(folder), renderer_of(folder)
    function = {"name": "f", "parameters": {"type": "object", "properties": {"é": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"é": "a"}}}
    sent = {**call, "function": {"name": "f", "arguments": '{"é": "a"}'}}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "b"}
    want = hf.apply_chat_template(
        [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    given = [*USER, {"role": "assistant", "content": None, "tool_calls": [sent]}, answer]
    strict = [{"type": "function", "function": {**function, "strict": False}}]
    for offered in (tools, strict, tuple(tools)):
        assert mine.render_text(ChatPrompt(given, tools=offered)) == want
    assert "<tools>" in want and "<tools>" not in mine.render_text(ChatPrompt(given, tools=[]))
    for wrong, complaint in (
        ("f", "tools is 'f'; expected a list"),
        ([3], r"tools has 3 as tools\[0\]"),
        ([{"type": "function", "function": {}}], r"tools has None as the name of tools\[0\]"),
    ):
        with pytest.raises(UsageError, match=complaint):
            mine.render_text(ChatPrompt(USER, tools=wrong))  # type: ignore[arg-type]


def test_one_bos(tmp_path: Path) -> None:
    """The tokenizer adds BOS to other prompts; a template that writes one gets no second, and one that writes none gets none."""
    mine = renderer_of(write_tokenizer(tmp_path / "model", "{{ bos_token }}" + CHATML))
    assert mine.render(ChatPrompt(USER)).token_ids.count(256) == 1
    assert 256 not in mine.render(ChatPrompt(USER, chat_template=CHATML)).token_ids
    assert mine._tokenizer.encode("Hi")[0] == 256


def test_parts_of_text(tmp_path: Path, renderer: ChatRenderer) -> None:
    """As in vLLM: lines of a text for a template that reads text, parts for one that loops over them."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    loops = "{% for m in messages %}{% set c = m.content %}{% for part in c %}[{{ part.text }}]{% endfor %}{% endfor %}"
    for template, content, want in (
        ("{{ messages[0].content }}", parts, "a\nb"),
        (loops, parts, "[a][b]"),
        (loops, "ab", "[ab]"),
        (TEMPLATES["gemma"], parts, "<s><start_of_turn>user\nab<end_of_turn>\n"),
    ):
        prompt = ChatPrompt([{"role": "user", "content": content}], False, chat_template=template)
        assert renderer.render_text(prompt) == want


def test_smollm2(smollm2: Path) -> None:
    mine = renderer_of(smollm2)
    rendered = mine.render(ChatPrompt(USER))
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert rendered.text == f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.token_ids == load_tokenizer(open_checkpoint(smollm2)).encode(rendered.text)
    assert mine.files.special_tokens["eos_token"] == "<|im_end|>"


def test_files_of_a_folder(tmp_path: Path) -> None:
    """transformers finds the same template in every form."""
    named = [
        {"name": "default", "template": "d"},
        {"name": "rag", "template": "r"},
        {"name": "tool_use", "template": "t"},
    ]
    folder = tmp_path / "model"
    seen = []
    for template in ("text", named, None):
        write_tokenizer(folder, template)
        seen.append(renderer_of(folder).files.templates)
        want = AutoTokenizer.from_pretrained(folder).chat_template
        assert (seen[-1] or None) == ({"default": want} if isinstance(want, str) else want)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert renderer_of(folder).files.templates == {"default": "of a processor"}
    write_tokenizer(folder, named)
    assert [renderer_of(folder).render_text(ChatPrompt(USER, chat_template=name)) for name in (None, "rag", "own")] == [
        "d",
        "r",
        "own",
    ]
    assert renderer_of(folder).render_text(ChatPrompt(USER, chat_template_kwargs={"tools": [{}]})) == "t"
    tool = {"type": "function", "function": {"name": "f"}}
    assert renderer_of(folder).render_text(ChatPrompt(USER, tools=[tool])) == "t"
    assert renderer_of(folder).template_text == "d\nt"
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "other.jinja").write_text("o")
    hf = AutoTokenizer.from_pretrained(folder)
    assert renderer_of(folder).files.templates == hf.chat_template == {"default": "file", "other": "o"}


def test_keys_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("llama-bpe")
    w.add_token_list(["a", "b", "ab", "<|endoftext|>", "<|im_end|>"])
    w.add_token_types([1, 1, 1, 3, 3])
    w.add_token_merges(["a b"])
    w.add_bos_token_id(3)
    w.add_eos_token_id(4)
    w.add_pad_token_id(0xFFFFFFFF)  # llama.cpp's -1
    w.add_chat_template([{"name": "default", "template": "d{{ eos_token }}"}, {"name": "rag", "template": "r"}])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    mine = renderer_of(path)
    assert mine.files.templates == {"default": "d{{ eos_token }}", "rag": "r"}
    assert mine.files.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert mine.render_text(ChatPrompt(USER)) == "d<|im_end|>"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (5, "is 5; expected a template or a list of templates with names"),
        ([{"name": "default"}], 'expected {"name": ..., "template": ...} of text'),
        ("x" * (MAX_TEMPLATE_BYTES + 1), "a chat template has at most 256 Ki"),
    ],
)
def test_damaged_files(tmp_path: Path, template: Any, complaint: str) -> None:
    with pytest.raises(ModelError) as raised:
        renderer_of(write_tokenizer(tmp_path / "model", template)).render(ChatPrompt(USER))
    assert complaint in str(raised.value) and "\n" not in str(raised.value)


def test_model_without_a_template(tmp_path: Path) -> None:
    mine = renderer_of(write_tokenizer(tmp_path / "model", None))
    with pytest.raises(UsageError, match="model: has no chat template, as base models have none; give one as"):
        mine.render(ChatPrompt(USER))
    assert mine.render_text(ChatPrompt(USER, chat_template=CHATML)).endswith("assistant\n")


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('Be\nkind') }}", "refuses the conversation: Be kind"),
        ("{{ nothing.there }}", "does not fit the conversation: UndefinedError: 'nothing' is undefined"),
        ("{% if %}", "is not valid at line 1: TemplateSyntaxError: Expected an expression"),
        ("{% include 'x' %}", "does not fit the conversation: TypeError: no loader"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% set ns = namespace(__x=1) %}", "SecurityError: a namespace has no attribute '__x'"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "is not valid: RecursionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("x" * 300_000, "has 300000 characters; a chat template has at most 256 Ki"),
    ],
)
def test_wrong_templates(renderer: ChatRenderer, template: str, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        renderer.render(ChatPrompt(USER, chat_template=template))
    assert str(raised.value).startswith("the given chat template") and complaint in str(raised.value), raised.value
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("Hi", "the conversation is 'Hi'; expected a list of messages"),
        ([], "the conversation has no messages; give at least one"),
        (["Hi"], "message 0 is 'Hi'; expected {\"role\": one of system, developer, user, assistant, tool, "),
        ([*USER, {"content": "x"}], "message 1 has no role; expected"),
        ([*USER, {"role": "robot", "content": "x"}], "message 1 has the role 'robot'; expected"),
        ([*USER, {"role": ["user"], "content": "x"}], "message 1 has the role ['user']; expected"),
        ([*USER, {"role": "assistant"}], "message 1 has no content; expected"),
        ([*USER, {"role": "user", "content": None}], "message 1 has no content; expected"),
        ([*USER, {"role": "user", "content": 5}], "the content of message 1 is 5; expected text, or a list of"),
        ([{"role": "user", "content": ["x"]}], "part 0 of the content of message 0 is 'x'; this model takes text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part 0 of the content of message 0 is 'image_url'"),
        ([{"role": "user", "content": b"x"}], "message 0['content'] is a bytes; expected what JSON can hold"),
        ([{"role": "user", "content": "x", 5: "y"}], "message 0 has the key 5; keys are text"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode at character"),
        (USER * 100_001, "the conversation has 100001 messages; at most 100000 are taken"),
    ],
)
def test_malformed_messages(renderer: ChatRenderer, messages: Any, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        renderer.render(ChatPrompt(messages))
    assert complaint in str(raised.value), raised.value


def test_wrong_options(renderer: ChatRenderer) -> None:
    for options, complaint in (
        ({"chat_template": 5}, "chat_template is 5; expected"),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\]; expected a dict"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages', which is a parameter of its own"),
        ({"chat_template_kwargs": {"x": object}}, r"chat_template_kwargs\['x'\] is a type; expected what JSON"),
        ({"add_generation_prompt": 1}, "add_generation_prompt is 1; expected True or False"),
        ({"continue_final_message": True}, "continue_final_message needs add_generation_prompt=False"),
    ):
        with pytest.raises(UsageError, match=complaint):
            renderer.render(ChatPrompt(USER, **options))  # type: ignore[arg-type]


def test_objects_of_clients(renderer: ChatRenderer) -> None:
    """What the openai client returns can be put back into the conversation; keys without a value are as if not there."""
    answer = SimpleNamespace(model_dump=lambda: {"role": "assistant", "content": "x", "tool_calls": None})
    plain = [*USER, {"role": "assistant", "content": "x"}]
    assert renderer.render(ChatPrompt([*USER, answer])) == renderer.render(ChatPrompt(plain))  # type: ignore[list-item]


TOOL_TEMPLATES = {
    "tojson": "{% for m in messages %}{{ m.role }}:{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}\n{% endfor %}",
    "items": "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}"
    "{% for key, value in c.function.arguments | items %}[{{ key }}={{ value | tojson }}]{% endfor %}{% endfor %}{% endfor %}",
    "asks": "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}\n{% endfor %}",
}
ARGUMENTS: list[dict[str, Any]] = [{"city": "Zürich", "days": 3}, {"a": {"b": [1.5, None, True, '"q"']}}, {}]


def with_call(arguments: Any, **message: Any) -> list[Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    return [*USER, {"role": "assistant", "tool_calls": [call], **message}, answer]


def test_arguments_of_tool_calls_are_objects(tmp_path: Path) -> None:
    """As JSON text (OpenAI's) or as they are, templates read what transformers gives them for objects."""
    named = [{"name": name, "template": template} for name, template in TOOL_TEMPLATES.items()]
    folder = write_tokenizer(tmp_path / "model", named)
    hf, mine = AutoTokenizer.from_pretrained(folder), renderer_of(folder)
    for name, arguments in itertools.product(TOOL_TEMPLATES, ARGUMENTS):
        want = hf.apply_chat_template(with_call(arguments), tokenize=False, chat_template=name)
        for given in (arguments, json.dumps(arguments), json.dumps(arguments, indent=3)):
            for content in ({}, {"content": None}, {"content": ""}):
                assert mine.render_text(ChatPrompt(with_call(given, **content), chat_template=name)) == want, (
                    name,
                    given,
                )
    for blank in ("", " ", None):
        assert "<f {}>" in mine.render_text(ChatPrompt(with_call(blank), chat_template="tojson"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ '```' + c['function']['arguments'] + '```' }}",
        "{{ '```' ~ c.function.arguments ~ '```' }}",
        "{{ c.function.arguments }}",
    ],
)
def test_templates_that_join_arguments_get_text(renderer: ChatRenderer, template: str) -> None:
    """As that of DeepSeek R1, also for arguments that were given as an object."""
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + template + "{% endfor %}{% endfor %}"
    for given in ({"city": "Zürich"}, '{"city":"Zürich"}'):
        text = renderer.render_text(ChatPrompt(with_call(given), chat_template=source))
        assert json.loads(text.strip("`")) == {"city": "Zürich"}


def test_no_content_beside_tool_calls(renderer: ChatRenderer) -> None:
    """Whatever a template does with content that is not there: test it for null, join it, look into it, or nothing."""
    for body, want in (
        ("{% if m.content is none %}null{% else %}{{ 'x' + m.content }}{% endif %}", "null"),
        ("{{ '[' + m.content + ']' }}", "[]"),
        ("{% if 'a' in m.content %}a{% endif %}-", "-"),
        ("{% if m.content is defined %}defined{% endif %}-", "-"),
        ("{{ m.content | trim }}-", "-"),
    ):
        source = "{% for m in messages if m.role == 'assistant' %}" + body + "{% endfor %}"
        for content in ({}, {"content": None}):
            assert renderer.render_text(ChatPrompt(with_call("{}", **content), chat_template=source)) == want, body
    old = [*USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}]
    source = "{% for m in messages if m.function_call %}{{ m.function_call.arguments.a }}{% endfor %}"
    assert renderer.render_text(ChatPrompt(old, chat_template=source)) == "1"
    none = [*USER, {"role": "assistant", "content": "x", "tool_calls": []}]
    assert renderer.render_text(ChatPrompt(none, chat_template="{{ messages[1].tool_calls is defined }}")) == "False"


@pytest.mark.parametrize(
    ("calls", "complaint"),
    [
        ("f", "the tool_calls of message 1 are 'f'; expected a list"),
        ([5], 'tool call 0 of message 1 is 5; expected {"type": "function"'),
        ([{"id": "a"}], "tool call 0 of message 1 is None; expected"),
        ([{"function": {"arguments": "{}"}}], "tool call 0 of message 1 is {'arguments': '{}'}; expected"),
        (
            [{"function": {"name": "f", "arguments": "{"}}],
            "the arguments of tool call 0 of message 1 are not valid JSON (Expec",
        ),
        (
            [{"function": {"name": "f", "arguments": "[1]"}}],
            "the arguments of tool call 0 of message 1 are [1]; expected a JSON o",
        ),
        (
            [{"function": {"name": "f", "arguments": 5}}],
            "the arguments of tool call 0 of message 1 are 5; expected a JSON object",
        ),
        ([{"function": {"name": "f", "arguments": '{"a": NaN}'}}], "are not valid JSON (NaN is no JSON)"),
        ([{"function": {"name": "f", "arguments": "[" * 99_999}}], "are not valid JSON (maximum recursion depth"),
        ([{"function": {"name": "f", "arguments": '{"a":' * 80 + "1" + "}" * 80}}], "is nested more than 64 deep"),
    ],
)
def test_malformed_tool_calls(renderer: ChatRenderer, calls: Any, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        renderer.render(ChatPrompt([*USER, {"role": "assistant", "tool_calls": calls}]))
    assert complaint in str(raised.value) and "\n" not in str(raised.value)
