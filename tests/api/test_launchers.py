"""`distmk generate` prints the same under every launcher as on one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.helpers import Finished, Launcher, Runner, alone, under_mpirun, under_torchrun, with_ranks

pytestmark = pytest.mark.timeout(200)

PROMPTS = ("The capital of France is", "Water boils at", "def fibonacci(n):")
FIELDS = ["prompt", "prompt_ids", "token_ids", "text", "finish_reason", "tensor_parallel", "backend", "ms_per_token"]
LAUNCHERS = {"ranks": (with_ranks, 4), "mpirun": (under_mpirun, 3), "torchrun": (under_torchrun, 2)}


def generate(runner: Runner, model: Path, launcher: Launcher, *more: str) -> Finished:
    arguments = ("--model", str(model), "--max-new-tokens", "6", "--max-model-len", "64", *more)
    finished = runner.distmk("generate", "--prompt", *PROMPTS, *arguments, launcher=launcher)
    assert finished.status == 0, finished.stderr
    assert len(finished.own_lines) == 2, finished.stderr  # the formats of the matrices, and the statistics
    return finished


@pytest.fixture(scope="module")
def one_rank(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of one rank, as text and as JSON."""
    runner = Runner(tmp_path_factory.mktemp("one_rank"))
    text = generate(runner, smollm2, alone).stdout
    return {"text": text, "json": generate(runner, smollm2, alone, "--json").objects()}


@pytest.mark.whole
def test_one_rank(one_rank: dict[str, Any]) -> None:
    """The JSON of one rank is complete, and its text is what is printed without it."""
    assert [list(each) for each in one_rank["json"]] == [FIELDS] * len(PROMPTS)
    assert one_rank["text"] == "".join(each["text"] + "\n" for each in one_rank["json"])
    for each, prompt in zip(one_rank["json"], PROMPTS, strict=True):
        assert each["prompt"] == prompt
        assert len(each["token_ids"]) == 6
        assert (each["finish_reason"], each["tensor_parallel"], each["backend"]) == ("length", 1, "host")
        assert 0 < each["ms_per_token"] < 10_000
    assert one_rank["json"][0]["text"].startswith(" Paris")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("name", "form"), [("ranks", "text"), ("mpirun", "json"), ("torchrun", "json")])
def test_launcher(name: str, form: str, smollm2: Path, one_rank: dict[str, Any], runner: Runner) -> None:
    make, num_ranks = LAUNCHERS[name]
    finished = generate(runner, smollm2, make(num_ranks), *(["--json"] if form == "json" else []))
    if form == "text":
        assert finished.stdout == one_rank["text"]
        return
    for got, want in zip(finished.objects(), one_rank["json"], strict=True):
        assert got == want | {"tensor_parallel": num_ranks, "ms_per_token": got["ms_per_token"]}


FAULTY = """
import sys
from distmk import LLM
with LLM(sys.argv[1]) as llm:
    stream = llm.stream([[1, 2, 3]])
    for _ in stream:
        raise ValueError("of the caller")
"""


@pytest.mark.parametrize("name", ["mpirun", "torchrun"])
def test_error_of_the_caller_ends_the_job(name: str, tiny_model: Path, runner: Runner) -> None:
    """Rank 0's exception is printed unchanged, and the other ranks, which see no tokens, do not wait for it."""
    script = runner.folder / "faulty.py"
    script.write_text(FAULTY)
    make, _ = LAUNCHERS[name]
    finished = runner.run(make(2)([sys.executable, str(script), str(tiny_model)]))
    assert finished.status != 0
    assert "ValueError: of the caller" in finished.stderr
    assert "is closed" not in finished.stderr and "RuntimeError" not in finished.stderr, finished.stderr
