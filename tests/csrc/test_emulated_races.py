"""The GPU's kernel under ThreadSanitizer, played by the CPU: what a block's threads tell each other through shared memory and
barriers, and blocks and ranks through memory and events, is ordered. Every GPU thread is a thread to it.

python -m pytest -q tests/csrc/test_emulated_races.py        # no GPU; what racecheck looks at on one, and more

As for racecheck, every lane arrives at barriers for itself and flags are atomic. It cannot see what the asynchronous copies
need beside their barriers, nor fences that are too weak.
"""

from __future__ import annotations

import platform
import random
from pathlib import Path

import pytest
from support import graphs
from support.ranks_in_process import assert_clean, run_ranks, tool
from support.tiny_config import tiny_config

from distmk.backends.defaults import backend_choices
from distmk.lower import DecodeOptions, lower
from distmk.model.operators import build_model
from distmk.program.program import Program, compile_graph

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator's fibers are written for x86-64"),
]
RACECHECK = "-DDISTMK_RACECHECK"


def decode(
    num_ranks: int,
    num_workers: int,
    num_layers: int = 1,
    max_model_len: int = 64,
    head_dim: int = 16,
    attention: str = "spread",
) -> Program:
    """A decode step, as for a GPU but for how `attention` is launched; that splits from 16 positions on."""
    choices = {**backend_choices("emulated"), "min_split": 16, "attention_launch": attention}
    options = DecodeOptions(num_ranks, num_workers, max_seqs=4, max_model_len=max_model_len, page_size=16, **choices)  # type: ignore[arg-type]
    return compile_graph(lower(build_model(tiny_config(num_layers=num_layers, head_dim=head_dim)), options))


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "num_layers", "longer", "attention", "place"),
    [
        (1, 2, 1, 130, "spread", ("--ride",)),
        (1, 2, 1, 0, "massive", ("--ride",)),
        (2, 1, 2, 0, "spread", ()),
        (2, 1, 1, 0, "spread", ("--ride", "--delay", "0,1,0")),
    ],
)
def test_decode(
    num_ranks: int,
    num_workers: int,
    num_layers: int,
    longer: int,
    attention: str,
    place: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of up to 22 tokens, sequences that come and go: iterations of one row and of many. Of a context that is so much
    `longer` warps have several chunks, and heads are of 64 elements, so that single rows' keys and values come through the
    ring. Attention handed out, by waiters that are their workers' schedulers and so prepare batches, too. By a network to ranks
    of other nodes, of one rank each.
    """
    seed = str(random.randrange(2**31))
    print(f"seed {seed}")
    if attention == "massive":  # rings as short as where workers are many, and so at hand
        monkeypatch.setattr("distmk.program.layout._ring_capacity", lambda graph: 4)
    head_dim = 64 if longer else 16
    binary = tool("thread", RACECHECK, emulated=True)
    program = decode(num_ranks, num_workers, num_layers, 64 + longer, head_dim, attention)
    done = run_ranks(binary, program, tmp_path, *place, "--longer", str(longer), "--seed", seed)
    assert_clean(done, num_ranks)


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ("all_reduce", ("--ride",)),
        ("handed_out", ()),
        ("handed_out", ("--ride",)),
        ("spread", ("--ride",)),
        ("overtaken", ("--ride",)),
    ],
)
def test_small_graphs(shape: str, place: tuple[str, ...], tmp_path: Path) -> None:
    """Tasks that are pushed to peers, handed out by schedulers or spread, or were expected and taken back, for a fixed number of
    iterations.
    """
    seed = str(random.randrange(2**31))
    print(f"seed {seed}")
    program = compile_graph(graphs.SHAPES[shape](2, 2))
    done = run_ranks(tool("thread", RACECHECK, emulated=True), program, tmp_path, *place, "--seed", seed, iterations=8)
    assert_clean(done, 2)


def test_missing_release_is_reported(tmp_path: Path) -> None:
    """Barriers at which arrivals order nothing."""
    binary = tool("thread", RACECHECK, "-DDISTMK_PLANT_MISSING_RELEASE", emulated=True)
    done = run_ranks(binary, decode(1, 1), tmp_path, "--ride", first_only=True)
    assert done.returncode == 66 and "WARNING: ThreadSanitizer: data race" in done.stdout, done.stdout[-3000:]
