"""The GPU's kernel, played by the CPU: a tiny model's tokens must be the host twin's, however the launch is run.

python -m pytest -q tests/runtime/test_emulator.py
DISTMK_TEST_EMULATOR_SEED=7 python -m pytest ...       # the timing of one run again

tests/gpu has more that runs there: every task body, logits against transformers (`-k emulated`).
"""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path

import graphs
import numpy as np
import pytest
from faults import check_hang, event_between, write_config
from helpers import Runner, alone, under_mpirun

from distmk.bootstrap.single import SingleBootstrap
from distmk.config import PRESETS
from distmk.engine import GPU_MIN_SPLIT
from distmk.lower import DecodeOptions, lower
from distmk.model import build_model
from distmk.program import compile_graph
from distmk.session import Session

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator's fibers are written for x86-64"),
]
WORKERS = 3
CONFIG = dataclasses.replace(
    PRESETS["smollm2-135m"],
    hidden_size=192,
    intermediate_size=320,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=32,
    vocab_size=300,
    tie_embeddings=False,
)
OPTIONS = ("--workers", str(WORKERS), "--max-num-seqs", "2", "--max-model-len", "64", "--ignore-eos", "--json")
PROMPTS = ("--prompt-ids", "1,2,3", ",".join(map(str, range(5, 38))), "--max-new-tokens", "6")
SEED = os.environ.get("DISTMK_TEST_EMULATOR_SEED") or str(int.from_bytes(os.urandom(4), "little"))


def generate(runner: Runner, folder: Path, backend: str, num_ranks: int, *more: str, **env: str) -> list[list[int]]:
    model = write_config(CONFIG, folder / "config.json")
    print(f"repeat with DISTMK_TEST_EMULATOR_SEED={SEED}")
    launcher = under_mpirun(num_ranks) if num_ranks > 1 else alone
    command = ("generate", "--model", str(model), "--load-format", "dummy", "--backend", backend, *OPTIONS, *PROMPTS)
    done = runner.distmk(*command, *more, launcher=launcher, env={"DISTMK_EMULATOR_SEED": SEED, **env})
    assert done.status == 0, done.stderr
    return [record["token_ids"] for record in done.objects()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The host twin's."""
    folder = tmp_path_factory.mktemp("host")
    return generate(Runner(folder), folder, "host", 1)


@pytest.mark.parametrize(
    ("num_ranks", "options", "environment"),
    [
        (1, (), {}),
        (3, (), {}),
        (2, ("--schedulers", "2"), {}),
        (2, (), {"DISTMK_LAUNCH_ITERATIONS": "1"}),
    ],
)
def test_same_tokens(
    runner: Runner,
    tmp_path: Path,
    expected: list[list[int]],
    num_ranks: int,
    options: tuple[str, ...],
    environment: dict[str, str],
) -> None:
    got = generate(runner, tmp_path, "emulated", num_ranks, *options, **environment)
    assert got == expected
    assert [len(tokens) for tokens in got] == [6, 6]


def order_of_tasks(session: Session) -> list[tuple[int, int, int]]:
    """(iteration, task, worker) of a few iterations, as they ended."""
    trace = session.run_traced(4)
    assert trace is not None
    rows = np.sort(trace.rows, order="end_ns")
    return list(zip(rows["iteration"].tolist(), rows["order"].tolist(), rows["runner"].tolist(), strict=True))


def test_seed_repeats_the_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def orders(seed: str, count: int) -> list[list[tuple[int, int, int]]]:
        monkeypatch.setenv("DISTMK_EMULATOR_SEED", seed)
        session = Session(graphs.handed_out(1, 4), SingleBootstrap(5.0), backend="emulated")
        try:
            return [order_of_tasks(session) for _ in range(count)]
        finally:
            session.close()

    first, again = orders("7", 2)
    assert first == again
    others = [orders(str(seed), 1)[0] for seed in range(8, 13)]
    assert any(other != first for other in others)


@pytest.mark.parametrize("consumer", ["layer0.o.reduce", "gate"])
def test_signal_that_never_comes(runner: Runner, tmp_path: Path, consumer: str) -> None:
    source, target = (0, 1) if consumer == "gate" else (1, 0)
    options = DecodeOptions(
        2, WORKERS, max_rows=2, max_model_len=64, min_split=GPU_MIN_SPLIT, tiled=True, attention_launch="spread"
    )
    event, waiter = event_between(compile_graph(lower(build_model(CONFIG), options)), source, target, consumer)
    model = write_config(CONFIG, tmp_path / "config.json")
    command = ("generate", "--model", str(model), "--load-format", "dummy", "--backend", "emulated", *OPTIONS, *PROMPTS)
    fault = {"DISTMK_FAULT_DROP_SIGNAL": f"{source},{target},{event},4", "DISTMK_EMULATOR_SEED": SEED}
    done = runner.distmk(*command, "--deadline", "2", "--ranks", "2", env=fault)
    check_hang(done, target, event, waiter)
    runner.check_nothing_left()
