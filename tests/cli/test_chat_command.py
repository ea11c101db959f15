"""Questions on the command line: `distmk generate --chat`, and `distmk chat` in a terminal and in a pipe."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
from support.chat_model import VOCAB_SIZE, write_chat_model, write_tokenizer
from support.chat_templates import CHATML
from support.faults import write_config
from support.helpers import DISTMK, Runner
from support.terminal import Terminal
from support.tiny_config import tiny_config

from distmk.cli import main
from distmk.text.chat.messages import ChatPrompt
from distmk.text.chat.render import ChatRenderer
from distmk.text.tokenizer import EncodedPrompt

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model", CHATML)


def test_generate_asks_through_the_template(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", str(model), "--workers", "1", "--max-tokens", "5", "--json", "--ignore-eos"]
    sampled = ["--temperature", "1", "--sampling-seed", "7"]
    assert main([*command, "--chat", "--system", "Be brief", "-p", "Hi", "Bye", *sampled]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["prompt"] == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second["prompt"] == first["prompt"].replace("Hi", "Bye") and len(second["token_ids"]) == 5
    assert main([*command, "-p", first["prompt"], *sampled]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["prompt_ids"] == [256, *first["prompt_ids"]], "a prompt as text gets BOS, and no template"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--chat", "--prompt-ids", "1,2"], "--chat takes text (--prompt); token ids are the whole prompt already"),
        (["--system", "Be brief", "-p", "Hi"], "--system needs --chat"),
        (["--chat", "-p", "Hi", "--temperature", "-1"], "temperature is -1.0"),
        (["--chat", "-p", "Hi" * 500], "leaves no room in a context of 400"),
    ],
)
def test_wrong_options(
    model: Path, options: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, before any rank is started."""
    monkeypatch.setattr("distmk.api.llm_engine.connect", lambda num_ranks: pytest.fail("ranks were started"))
    assert main(["generate", "--model", str(model), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distmk: ") and complaint in line


def test_chat_in_a_terminal(tmp_path: Path, runner: Runner) -> None:
    """Two ranks. Ctrl-C stops the answer alone, and leaves the second time at the prompt; what is generated cannot command."""
    folder = write_tokenizer(tmp_path / "model", CHATML)
    write_config(tiny_config(vocab_size=VOCAB_SIZE), folder / "config.json")
    options = ["--load-format", "dummy", "--max-model-len", "20000", "--ranks", "2", "--workers", "1", "--ignore-eos"]
    terminal = Terminal(runner, [*DISTMK, "chat", str(folder), *options, "--max-tokens", "15000", "--temperature", "1"])
    try:
        terminal.wait_for("> ", 120)
        terminal.type("Hello\n")
        terminal.wait_for("\\x")  # in the middle of an answer
        terminal.type("\x03")
        answer = terminal.wait_for("[stopped]")
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", answer.replace("^C", "").replace("\ufffd", "")), (
            answer
        )
        terminal.wait_for("> ")
        terminal.type("/dance\n")
        terminal.wait_for("distmk: '/dance' is no command; /help lists them")
        terminal.type("/reset\n")
        terminal.wait_for("distmk: a new conversation\r\n")
        terminal.type("/system Be brief\n")
        terminal.wait_for("distmk: a new conversation, with this system message")
        terminal.type("/help\n")
        terminal.wait_for("begin a new conversation, with the same system message")
        terminal.wait_for("> ")
        terminal.type("x" * 900 + "\n")
        terminal.wait_for("\\x")
        terminal.type("\x03")
        terminal.wait_for("[stopped]")
        for reply in ("Ctrl-C again leaves", "interrupted"):
            terminal.wait_for("> ")
            terminal.type("abc")
            terminal.wait_for("abc")
            time.sleep(0.2)  # readline misses a Ctrl-C between its last key and its wait for the next
            terminal.type("\x03")
            terminal.wait_for(reply)
        assert terminal.process.wait(30) == 130
    finally:
        terminal.close()


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_chat_in_a_pipe(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A message a line, with what was said before; one line says that the context is full."""
    asked: list[int] = []
    render = ChatRenderer.render

    def noted(self: ChatRenderer, prompt: ChatPrompt) -> EncodedPrompt:
        asked.append(len(prompt.messages))
        return render(self, prompt)

    monkeypatch.setattr(ChatRenderer, "render", noted)
    command = ["chat", str(model), "--workers", "1", "--max-tokens", "3", "--ignore-eos"]
    pipe(monkeypatch, b"Hi\n\n//etc\n/system Be brief\r\nBye\n/exit\nnot read\n")
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert asked == [1, 1, 3, 2], "of the first one, whether the template takes it"
    cut_off = "distmk: the answer was cut off after 3 tokens: --max-tokens N allows more"
    begun = "distmk: a new conversation, with this system message"
    assert out.count("\n") >= 3 and err.splitlines() == [cut_off, cut_off, begun, cut_off]
    for data, complaint in (
        (b"Hi\n" * 20, "tokens, and the context 400: /reset begins a new one"),
        (b"\xff\n", "line 1 of standard input: not UTF-8 at byte 0"),
    ):
        pipe(monkeypatch, data)
        assert main(command) == 2
        assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_context_that_fills_up(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, b"Hi\n")
    assert main(["chat", str(model), "--workers", "1", "--ignore-eos"]) == 0
    assert "tokens: the context is full, and /reset begins a new conversation" in capsys.readouterr().err


def test_chat_without_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor under a launcher, in one line."""
    folder = write_tokenizer(tmp_path / "model", None)
    write_config(tiny_config(vocab_size=VOCAB_SIZE), folder / "config.json")
    assert main(["chat", str(folder), "--load-format", "dummy"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model: has no chat template, as base models have none" in line
