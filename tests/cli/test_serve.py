"""`distmk serve` with a model: the engine's tokens over HTTP, its end, and wrong options."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from support.fake_engine import until
from support.helpers import DISTMK, ROOT, Launcher, Runner, alone, assert_one_line, under_mpirun

from distmk import LLM, SamplingParams

PROMPT = "Gravity is"


def start(runner: Runner, *arguments: str, launcher: Launcher = alone) -> tuple[subprocess.Popen[str], str]:
    """A server on a free port, and its address."""
    process = runner.start(launcher([*DISTMK, "serve", *arguments, "--port", "0", "--workers", "1"]))
    assert process.stderr is not None
    line = ""
    while not (found := re.search(r"http://\S+", line)):
        line = process.stderr.readline()
        assert line, "the server ended"
    return process, found[0]


def process_with(runner: Runner, variable: str) -> int:
    """The process that has a variable such as NAME=1 in its environment."""
    (found,) = [
        pid for pid in runner.left() if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    return found


def test_tokens_and_the_loss_of_a_rank(smollm2: Path, runner: Runner) -> None:
    """Greedy tokens are those of `LLM`; a rank that dies, also while nothing is asked, ends the server with its name."""
    process, url = start(runner, str(smollm2), "--ranks", "2", "--max-model-len", "256", "--served-model-name", "smol")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask = {"model": "smol", "prompt": PROMPT, "temperature": 0, "max_tokens": 32, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**ask).choices[0]
    stream = "".join(piece.choices[0].text for piece in client.completions.create(**ask, stream=True))
    stopped = client.completions.create(**ask, stop=[whole.text[20:26]]).choices[0]
    with LLM(str(smollm2), tensor_parallel_size=2, num_workers=1, max_model_len=256) as llm:
        offline = llm.generate(PROMPT, SamplingParams(max_tokens=32, ignore_eos=True))[0].outputs[0].text
    assert whole.text == stream == offline
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(whole.text[20:26])], "stop")
    until(lambda: httpx.get(f"{url}/stats").json()["num_running"] == 0)
    stats = httpx.get(f"{url}/stats").json()
    assert stats["num_free_kv_pages"] == stats["num_kv_pages"] and stats["num_generated_tokens"] >= 64
    os.kill(process_with(runner, "DISTMK_RANK=1"), signal.SIGKILL)
    finished = runner.finish(process)
    assert finished.status == 4, finished.stderr
    assert "rank 1" in finished.stderr and "Traceback" not in finished.stderr


@pytest.mark.parametrize("launcher", [alone, under_mpirun(2)], ids=["alone", "mpirun"])
def test_a_model_without_tokenizer(launcher: Launcher, tiny_model: Path, runner: Runner) -> None:
    """Token ids go in and out; SIGTERM ends with status 0, under mpirun (which itself would end with 1) that of rank 0."""
    process, url = start(runner, str(tiny_model), "--served-model-name", "tiny", launcher=launcher)
    ask = {"model": "tiny", "prompt": [1, 2, 3], "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    choice = httpx.post(f"{url}/v1/completions", json=ask).json()["choices"][0]
    assert len(choice["token_ids"]) == 4 and choice["text"] == ""
    for body in ({"prompt": "text"}, {"prompt": [1], "stop": ["a"]}):
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", **body, "temperature": 0})
        assert answer.status_code == 400 and "no tokenizer" in answer.json()["error"]["message"]
    os.kill(process.pid if launcher is alone else process_with(runner, "OMPI_COMM_WORLD_RANK=0"), signal.SIGTERM)
    finished = runner.finish(process)
    assert (finished.status, finished.stdout) == (0, ""), finished.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "--port is 70000; expected 0 to 65535"),
        (["--host", "no.such.host.invalid"], "--host 'no.such.host.invalid'"),
        (["--max-queue", "-1"], "--max-queue is -1"),
        (["--drain", "nan"], "--drain is nan"),
        (["--write-timeout", "0"], "--write-timeout is 0"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "a", "--api-key", "b\n"], "--api-key 2 has U+000A as character 2, which no header can carry"),
        (["--api-key", "schlüssel€"], "--api-key has U+20AC as character 10"),
        (["--api-key", "a\udcff"], "--api-key has U+DCFF as character 2"),
        (["--api-key", "key "], "--api-key begins or ends with a blank"),
        (["--allowed-hosts", "http://a.com"], "--allowed-hosts is 'http://a.com'; expected a name such as"),
        (["--allowed-hosts", "a.com", "--allowed-hosts", '["b.com", "c.com:80"]'], "--allowed-hosts is 'c.com:80'"),
        (
            ["--allowed-origins", "a.com"],
            "--allowed-origins is 'a.com'; expected an origin such as https://example.com",
        ),
        (["--allowed-origins", "https://a.com/page"], "--allowed-origins is 'https://a.com/page'"),
        (["--allowed-origins", "[1]"], "--allowed-origins is 1"),
        (["--allowed-methods", "[POST"], "--allowed-methods is '[POST'"),
        (["--allowed-headers", "x y"], "--allowed-headers is 'x y'"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
    ],
)
def test_wrong_options(
    arguments: list[str],
    says: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are refused before a model is loaded."""
    from distmk.cli import main

    assert main(["serve", str(tiny_model), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_access_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists by repetition and in vLLM's form; keys of both sources, with letters that Latin-1 has."""
    from distmk.cli import serve_access

    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    serve_access.add_access_options(parser)
    given = [
        "--allowed-origins",
        '["https://a.com", "vscode-webview://x"]',
        "--allowed-origins",
        "null",
        "--api-key",
        "é b",
    ]
    monkeypatch.setenv("DISTMK_API_KEY", "env-key")
    fields = serve_access.access_of(parser.parse_args([*given, "--allowed-hosts", "*.a.com", "--allow-credentials"]))
    assert fields["allowed_origins"] == ("https://a.com", "vscode-webview://x", "null")
    assert (fields["allowed_hosts"], fields["allowed_methods"]) == (("*.a.com",), ("*",))
    assert fields["api_keys"] == ("é b", "env-key") and fields["allow_credentials"] is True


def test_options_reach_the_server(tiny_model: Path) -> None:
    from distmk.cli import serve_command

    parser = argparse.ArgumentParser()
    serve_command.add_to(parser.add_subparsers())
    given = ["--write-timeout", "5", "--log-level", "warning", "--allowed-hosts", "*", "--host", "::1"]
    config = serve_command._config(parser.parse_args(["serve", str(tiny_model), *given]))
    assert (config.write_timeout_s, config.log_level) == (5, "warning")
    assert (config.allowed_hosts, config.host, config.allowed_origins) == (("*",), "::1", ())


def test_a_port_that_is_taken(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from distmk.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(tiny_model), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port} (Address already in use)" in capsys.readouterr().err


def test_without_the_extra(tiny_model: Path, runner: Runner) -> None:
    """The packages of a server are only needed by one."""
    (runner.folder / "fastapi.py").write_text("raise ModuleNotFoundError('no fastapi', name='fastapi')")
    finished = runner.distmk("serve", str(tiny_model), env={"PYTHONPATH": f"{runner.folder}:{ROOT}"})
    assert finished.status == 2
    assert_one_line(finished, "pip install 'distmk[serve]'")
