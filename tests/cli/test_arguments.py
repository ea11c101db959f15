"""Arguments of the commands: the model in two forms, vLLM's options, and errors that point to the command's own help."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_engine import FakeEngine
from support.served import served

from distmk.cli import build_parser, main
from distmk.cli.model_options import engine_args

COMMANDS = ("generate", "check", "serve", "chat", "graph")
ENGINES = ("generate", "serve", "chat")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("model", [("m",), ("--model", "m"), ("-m", "m"), ("m", "--model", "m")], ids=" ".join)
def test_a_model_is_given_in_two_ways(command: str, model: tuple[str, ...]) -> None:
    for arguments in ([*model, "-tp", "2"], ["--tensor-parallel-size", "2", *model], ["--ranks", "2", *model]):
        got = build_parser().parse_args([command, *arguments, "--revision", "r"])
        assert (got.model, got.ranks, got.revision) == ("m", 2, "r")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no model is given"),
        (("m", "--model", "n"), "two models are given, m and n"),
        (("m", "n"), "unrecognized arguments: n"),
        (("m", "--rank", "two"), "argument --ranks/-tp/--tensor-parallel-size: invalid int value: 'two'"),
        (("m", "--modle", "n"), "unrecognized arguments: --modle n; did you mean --model?"),
    ],
)
def test_errors_point_to_the_help_of_the_command(
    command: str, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"distmk: {says}") and line.endswith(f"; see distmk {command} --help")


@pytest.mark.parametrize("command", ENGINES)
def test_options_of_vllm(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    neutral = ["--dtype", "auto", "--enforce-eager", "--trust-remote-code", "--swap-space", "4", "--block-size=16"]
    neutral += ["--quantization", "None", "--no-enable-lora", "--hf-overrides", "{}", "--kv-cache-dtype", "auto"]
    got = build_parser().parse_args([command, *neutral, "m", "--tokenizer", "t", "--tokenizer-revision", "r"])
    args = engine_args(got)
    assert (args.model, args.tokenizer, args.revision, args.tokenizer_revision) == ("m", "t", None, "r")
    assert args.quantization is None
    assert engine_args(build_parser().parse_args([command, "m", "-q", "int4"])).quantization == "int4"
    for option, says in (
        (
            ("--dtype", "float16"),
            "--dtype is 'float16', which distmk does not support; weights and the KV cache are bf",
        ),
        (("--enable-lora",), "--enable-lora is True, which distmk does not support; merge the adapter"),
        (("-tp", "2", "--pipeline-parallel-size", "2"), "--pipeline-parallel-size is 2, which"),
        (("--enforce-eagerly",), "unrecognized arguments: --enforce-eagerly"),
    ):
        assert main([command, "m", *option]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"distmk: {says}") and line.endswith(f"; see distmk {command} --help")


def test_a_prompt_too_many_takes_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that take several values take the model too if it comes after them; the line says so."""
    assert main(["generate", "--prompt", "text", str(tmp_path)]) == 2
    assert "no model is given; options that take several values" in capsys.readouterr().err


def test_parsers_of_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Named as in vLLM, whose switch for tools changes nothing."""
    got = build_parser().parse_args(["serve", "m"])
    assert (got.reasoning_parser, got.tool_call_parser) == ("auto", "auto")
    options = ("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", "--reasoning-parser", "none")
    got = build_parser().parse_args(["serve", "m", *options])
    assert (got.reasoning_parser, got.tool_call_parser) == ("none", "qwen3_coder")
    assert main(["serve", "m", "--reasoning-parser", "thoughts"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--reasoning-parser" in line and "deepseek_r1" in line


def test_a_second_name() -> None:
    """Requests may use any of the names, answers have the first, and all are listed."""
    got = build_parser().parse_args(["serve", "m", "--served-model-name", "a", "b"])
    assert got.served_model_name == ["a", "b"]
    with served(FakeEngine(), served_model_name="a", other_model_names=("b",)) as server:
        listed = server.http.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["a", "b"]
        assert server.http.get("/v1/models/b").json()["id"] == "b"
        for name, status in (("a", 200), ("b", 200), ("m", 404)):
            answer = server.http.post("/v1/completions", json={"model": name, "prompt": "the", "max_tokens": 2})
            assert answer.status_code == status
            assert status == 404 or answer.json()["model"] == "a"
