"""The GPU's kernel in the emulator under ThreadSanitizer, which takes every GPU thread for a thread of its own.

Barriers must order accesses to shared memory, and events must order accesses of blocks and ranks to global memory.

python -m pytest -q tests/csrc/test_emulated_races.py        # no GPU; covers what compute-sanitizer's racecheck does, and more

As for racecheck, every lane arrives at barriers for itself, and flags are atomic. Two things are not covered: fences that
are too weak, and what asynchronous copies need beside their barriers.
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
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
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
    """A decode step like on a GPU. `attention` is how attention is launched; splits have at least 16 positions."""
    choices = {**backend_choices("emulated"), "min_kv_split_len": 16, "attention_launch": attention}
    options = DecodeOptions(num_ranks, num_workers, max_seqs=4, max_model_len=max_model_len, page_size=16, **choices)  # type: ignore[arg-type]
    return compile_graph(*lower_programs(build_model(tiny_config(num_layers=num_layers, head_dim=head_dim)), options))


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "num_layers", "head_dim", "longer", "attention", "place"),
    [
        (1, 2, 1, 64, 130, "spread", ("--ride",)),
        (1, 2, 1, 256, 130, "spread", ("--ride",)),
        (1, 2, 1, 16, 0, "massive", ("--ride",)),
        (1, 2, 1, 16, 0, "spread", ("--ride", "--constrained")),
        (2, 1, 2, 16, 0, "spread", ()),
        (2, 1, 1, 16, 0, "spread", ("--ride", "--delay", "0,1,0")),
    ],
)
def test_decode(
    num_ranks: int,
    num_workers: int,
    num_layers: int,
    head_dim: int,
    longer: int,
    attention: str,
    place: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of up to 22 tokens, and sequences that come and go: iterations of one row and of many.

    longer: positions added to the context of a single sequence, so that warps have several chunks. With heads of 64 elements,
    K and V of its rows come through the pipeline when they are alone in their batches.
    attention: massive attention is dispatched by warps that are their workers' schedulers and run the scheduler step, too.
    place: with `--delay 0,1,0` every rank is on a node of its own, reached over a network. With `--constrained` every second
    sequence has masks.
    """
    seed = str(random.randrange(2**31))
    print(f"seed {seed}")
    if attention == "massive":  # as short as with many workers: the kernel keeps these rings in shared memory
        monkeypatch.setattr("distmk.program.layout._ring_capacity", lambda graph: 4)
    binary = tool("thread", RACECHECK, emulated=True)
    program = decode(num_ranks, num_workers, num_layers, 64 + longer, head_dim, attention)
    requests = ("--requests", "1") if longer else ()  # the last of five requests comes when others have gone
    options = (*requests, "--tokens", "4", "--longer", str(longer), "--seed", seed)
    done = run_ranks(binary, program, tmp_path, *place, *options)
    assert_clean(done, num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "num_heads", "num_kv_heads", "num_layers", "longer"), [(2, 6, 3, 2, 24), (1, 4, 1, 1, 350)]
)
def test_job_iterations(
    num_ranks: int, num_heads: int, num_kv_heads: int, num_layers: int, longer: int, tmp_path: Path
) -> None:
    """A chunk of a prompt and a row that decodes: tasks need nothing of the iteration for their work before their waits are met.

    With two layers, the second reuses attention's order of jobs. With many heads per KV head and many positions, attention's
    warpgroups take turns, and fill the buffers of keys and values several times.
    """
    seed = str(random.randrange(2**31))
    print(f"seed {seed}")
    options = DecodeOptions(
        num_ranks,
        2,
        max_seqs=4,
        max_model_len=40 + longer,
        page_size=16,
        row_buckets=(40,),
        **backend_choices("emulated"),
    )  # type: ignore[arg-type]
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 64}
    model = build_model(tiny_config(num_layers=num_layers, max_position=512, **heads))
    request = ("--requests", "1", "--longer", str(longer), "--tokens", "2", *["--constrained"] * (num_ranks > 1))
    binary, program = tool("thread", RACECHECK, emulated=True), compile_graph(*lower_programs(model, options))
    assert_clean(run_ranks(binary, program, tmp_path, "--ride", *request, "--seed", seed), num_ranks)


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
    """A fixed number of iterations of tasks that push to peers, are dispatched by schedulers, are spread, or are issued early
    and revoked.
    """
    seed = str(random.randrange(2**31))
    print(f"seed {seed}")
    program = compile_graph(graphs.SHAPES[shape](2, 2))
    done = run_ranks(tool("thread", RACECHECK, emulated=True), program, tmp_path, *place, "--seed", seed, iterations=8)
    assert_clean(done, 2)


def test_missing_release_is_reported(tmp_path: Path) -> None:
    """The planted bug: arrivals at barriers order nothing."""
    binary = tool("thread", RACECHECK, emulated=True)
    done = run_ranks(binary, decode(1, 1), tmp_path, "--ride", "--missing-release", first_only=True)
    assert done.returncode == 66 and "WARNING: ThreadSanitizer: data race" in done.stdout, done.stdout[-3000:]
