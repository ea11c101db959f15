"""Questions on the command line: `distmk generate --chat`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.chat_model import write_chat_model
from support.chat_templates import CHATML

from distmk.cli import main

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
    monkeypatch.setattr("distmk.serving.llm.connect", lambda num_ranks: pytest.fail("ranks were started"))
    assert main(["generate", "--model", str(model), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distmk: ") and complaint in line
