"""`scripts/long_context.py`: a run on the host twin, which steps are timed, and what is left out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark import long_contexts
from benchmark.long_contexts import UNTIMED_STEPS, Case, missing_pages, parse_cases, step_bytes, time_case
from benchmark.work import hf_config
from long_context import Run, result_file
from result_tables import load, table
from support.helpers import ROOT, Runner, under_mpirun
from support.tiny_config import tiny_config

from distmk.bootstrap import connect
from distmk.errors import UsageError

SMALL = tiny_config("qwen3-8b", hidden_size=48, intermediate_size=75, num_layers=2, num_kv_heads=2, head_dim=8)
SCRIPT = [sys.executable, str(ROOT / "scripts" / "long_context.py")]
SHORT = ("--backend", "host", "--tokens", "5", "--repeats", "2")


@pytest.fixture
def config(runner: Runner) -> Path:
    path = runner.folder / "config.json"
    path.write_text(json.dumps(hf_config(SMALL) | {"max_position_embeddings": 512}))
    return path


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_run(num_ranks: int, config: Path, runner: Runner) -> None:
    """An object a case, in order. A context that the model does not have is left out, with a line that says so."""
    file = runner.folder / "result.json"
    command = [*SCRIPT, str(config), *SHORT, "--cases", "1x100,2x600,3x200", "--peer", "vllm", "--result", str(file)]
    done = runner.run(under_mpirun(num_ranks)(command) if num_ranks > 1 else command)
    assert done.status == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["sequences"], each["tokens_each"]) for each in found] == [(1, 100), (3, 200)]
    for each in found:
        assert each["engine"] == "distmk" and each["tensor_parallel"] == num_ranks and each["repeats"] == 2
        assert 0 <= each["min"] <= each["ms_per_step"] <= each["max"] and each["floor_ms"] is None
        assert abs(each["context"] - each["tokens_each"]) < 8
    times = [each["ms_per_step"] for each in found]
    assert "long_context: 2x600 left out: " in done.stderr
    assert "vllm is not installed" in done.stderr
    rows = table(load(file)).splitlines()[2:4]
    assert rows == [f"| {n} x {c} |  |  | {ms} |" for n, c, ms in ((1, 100, times[0]), (3, 200, times[1]))]


class Played:
    """In place of an LLM: tokens of the sequences in a given order, each a millisecond after the one before."""

    rank = 0
    engine = SimpleNamespace(config=SMALL, page_size=16, num_kv_pages=20)

    def __init__(self, order: list[int]) -> None:
        self.order, self.clock = order, 0.0

    def make_requests(self, prompts: list[list[int]], params: Any) -> int:
        return int(params.max_tokens)

    def run(self, max_tokens: int) -> Any:
        given: dict[int, int] = {}
        for index in self.order if max_tokens > 1 else range(2):
            given[index] = given.get(index, 0) + 1
            self.clock += 1e-3
            yield SimpleNamespace(index=index, finish_reason="length" if given[index] == max_tokens else None)


def played(monkeypatch: pytest.MonkeyPatch, order: list[int]) -> Played:
    llm = Played(order)
    monkeypatch.setattr(long_contexts, "time", SimpleNamespace(perf_counter=lambda: llm.clock))
    return llm


def test_only_steps_of_all_sequences_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last sequence's first token on; the other one had three tokens then, so the mean is two more than a prompt's."""
    llm = played(monkeypatch, [0, 0, 0, 1, 0, 1, 0, 1, 0, 1, *[0, 1] * UNTIMED_STEPS])
    case = Case(2, 100)
    length = sum(map(len, case.prompts(SMALL.vocab_size))) / 2
    timed = time_case(llm, case, tokens=3, repeats=2)  # type: ignore[arg-type]
    assert timed and timed.times_ms == pytest.approx([2.0, 2.0]) and timed.context == round(length + 2)


def test_a_sequence_that_ends_before(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = played(monkeypatch, [*[0] * (4 + UNTIMED_STEPS), *[1] * (4 + UNTIMED_STEPS)])
    assert time_case(llm, Case(2, 100), tokens=3, repeats=1) is None  # type: ignore[arg-type]


def test_prompts() -> None:
    """They differ, are nearly of the length that was asked for, and are the same in every call."""
    prompts = Case(16, 1000).prompts(331)
    assert all(984 <= len(each) <= 1000 and min(each) >= 0 and max(each) < 331 for each in prompts)
    assert len({tuple(each[:16]) for each in prompts}) == 16 and len(set(map(len, prompts))) > 8
    assert prompts == Case(16, 1000).prompts(331)


def test_pages() -> None:
    """20 pages of 16 tokens hold two sequences of up to 160 tokens."""
    llm: Any = Played([])
    room = 160 - UNTIMED_STEPS - 3 - 1
    assert missing_pages(llm, Case(2, room), tokens=3) == 0
    assert missing_pages(llm, Case(2, room + 1), tokens=3) == 2


def test_bytes_of_a_step() -> None:
    """Another sequence adds a row of the embedding, and its keys and values."""
    added = step_bytes(SMALL, 1, Case(3, 100), 100, 8) - step_bytes(SMALL, 1, Case(2, 100), 100, 8)
    cache = 2 * SMALL.num_layers * SMALL.num_kv_heads * SMALL.head_dim * (100 + 4)
    assert added == 2 * (cache + SMALL.hidden_size)


@pytest.mark.parametrize("text", ["8192", "1x", "0x100", "2x1", "1x2x3", ""])
def test_mistakes_in_cases(text: str) -> None:
    with pytest.raises(UsageError, match="--cases"):
        parse_cases(text)


def test_table_with_a_peer(tmp_path: Path) -> None:
    """The ratio of the peer's time to distmk's stands behind it."""
    given = {"model": "m", "cases": "1x100", "layers": 2, "tokens": 5, "repeats": 1, "backend": "host", "result": None}
    with connect() as bootstrap:
        (tmp_path / "config.json").write_text(json.dumps(hf_config(SMALL)))
        run = Run(argparse.Namespace(**given | {"model": str(tmp_path / "config.json")}), bootstrap)
    case = {"sequences": 1, "tokens_each": 100, "floor_ms": 2.0, "times_floor": 1.25}
    run.results = [case | {"engine": "distmk", "ms_per_step": 2.5}, case | {"engine": "vllm", "ms_per_step": 5.0}]
    (tmp_path / "some.json").write_text(json.dumps(result_file(run, "m")))
    lines = table(load(tmp_path / "some.json")).splitlines()
    assert lines[0] == "| sequences x context | floor, ms | times the floor | distmk, ms a step | vLLM |"
    assert lines[2] == "| 1 x 100 | 2.0 | 1.25 | 2.5 | 5.0 (2.00 x) |"
