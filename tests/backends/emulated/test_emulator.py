"""The GPU's kernel in the emulator: a tiny model's tokens are those of the host twin, however the launch is run.

python -m pytest -q tests/backends/emulated/test_emulator.py
DISTMK_TEST_EMULATOR_SEED=7 python -m pytest ...       # repeats the timing of a run

tests/tasks and tests/gpu run on the emulator, too: every task body, and logits against transformers (`-k emulated`).
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import graphs
from support.faults import check_hang, event_between, write_config
from support.helpers import Runner, alone, under_mpirun
from support.machine import FAR, virtual_hosts
from support.tiny_config import tiny_config

from distmk.abi import COMBINE_WIDTH, MAX_ROWS
from distmk.backends.build_cache import csrc_dir
from distmk.backends.defaults import backend_choices
from distmk.backends.host.build import EMULATOR_FLAGS, build_sources
from distmk.backends.launch_spec import LaunchSpec
from distmk.backends.weight_upload import fill_weights
from distmk.bootstrap.single import SingleBootstrap
from distmk.engine.session import Session
from distmk.lower import DecodeOptions, lower_programs
from distmk.lower.plan import plan_work
from distmk.model.config import ModelConfig
from distmk.models import build_model
from distmk.program.program import compile_graph
from distmk.tasks.splits import LONG_SPLITS
from distmk.weights.dummy import DummyCheckpoint

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator's fibers are written for x86-64"),
]
WORKERS = 3
NUM_WITH_RESERVED = 27
DEADLINE_S = 8  # beside other tests an iteration may take seconds without being a hang
CONFIG = tiny_config(hidden_size=192, intermediate_size=320, head_dim=32)
OPTIONS = ("--workers", str(WORKERS), "--max-num-seqs", "4", "--max-model-len", "64", "--ignore-eos", "--json")
PROMPTS = ("--prompt-ids", "1,2,3", ",".join(map(str, range(5, 38))), "--max-new-tokens", "6")
SEED = os.environ.get("DISTMK_TEST_EMULATOR_SEED") or str(int.from_bytes(os.urandom(4), "little"))


def generate_arguments(
    folder: Path, backend: str, *more: str, config: ModelConfig = CONFIG, prompts: tuple[str, ...] = PROMPTS
) -> tuple[str, ...]:
    """The arguments of a generate; the model's config.json is written to `folder`."""
    model = write_config(config, folder / "config.json")
    dummy = ("generate", "--model", str(model), "--load-format", "dummy")
    return (*dummy, "--backend", backend, *OPTIONS, *prompts, *more)


def generate(
    runner: Runner,
    folder: Path,
    backend: str,
    num_ranks: int,
    *more: str,
    config: ModelConfig = CONFIG,
    prompts: tuple[str, ...] = PROMPTS,
    **env: str,
) -> list[list[int]]:
    print(f"repeat with DISTMK_TEST_EMULATOR_SEED={SEED}")
    launcher = under_mpirun(num_ranks) if num_ranks > 1 else alone
    command = generate_arguments(folder, backend, *more, config=config, prompts=prompts)
    done = runner.distmk(*command, launcher=launcher, env={"DISTMK_EMULATOR_SEED": SEED, **env})
    assert done.status == 0, done.stderr
    return [record["token_ids"] for record in done.objects()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of the host twin."""
    folder = tmp_path_factory.mktemp("host")
    return generate(Runner(folder), folder, "host", 1)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("num_ranks", "options", "environment"),
    [
        pytest.param(1, (), {}, marks=pytest.mark.slow),
        pytest.param(3, (), {}, marks=pytest.mark.slow),
        pytest.param(2, ("--schedulers", "2"), {}, marks=pytest.mark.slow),
        (2, (), {"DISTMK_LAUNCH_ITERATIONS": "1"}),
        (1, (), {"DISTMK_LOOPBACK": "1"}),
        (3, (), {"DISTMK_VIRTUAL_NODE_SIZE": "2"}),
        (2, ("--schedulers", "2"), FAR),
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


@pytest.mark.parametrize(
    ("num_ranks", "environment"), [(1, {"DISTMK_LAUNCH_ITERATIONS": "3"}), pytest.param(2, FAR, marks=pytest.mark.slow)]
)
def test_a_request_that_is_put_back(
    runner: Runner, tmp_path: Path, num_ranks: int, environment: dict[str, str]
) -> None:
    """Two sequences come to need four pages, and there are three; the younger one goes on once the older one is over."""
    ids = [",".join(map(str, range(begin, begin + 14))) for begin in (5, 40)]
    prompts = ("--prompt-ids", *ids, "--max-new-tokens", "6", "--max-model-len", "32")
    want = generate(runner, tmp_path, "host", 1, prompts=prompts, DISTMK_ROW_BUCKETS="16")  # as in the emulator
    few = (*prompts, "--num-gpu-blocks-override", "3")
    assert generate(runner, tmp_path, "emulated", num_ranks, prompts=few, **environment) == want
    assert [len(tokens) for tokens in want] == [6, 6]


ALONE = [
    (2, 90, {"head_dim": 64}),
    # Two blocks of columns of a matrix.
    (1, 66, {"head_dim": 128, "num_heads": 17, "num_kv_heads": 1}),
    (1, 3, {"head_dim": 32, "hidden_size": 2304, "intermediate_size": 64}),
    # More ranks than groups of threads that push a row.
    (5, 3, {"head_dim": 16, "hidden_size": 80, "intermediate_size": 96}),
    # The second block has six tiles: warps without one pass by as many stages as the pipeline has, in an M_BLOCK of four M_TILEs.
    (1, 4, {"head_dim": 32, "hidden_size": 264, "intermediate_size": 3584}),
    # Three blocks, which do not fit into shared memory.
    (1, 4, {"head_dim": 32, "hidden_size": 64, "intermediate_size": 4200}),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("num_ranks", "num_tokens", "changes"), ALONE)
def test_one_sequence(runner: Runner, tmp_path: Path, num_ranks: int, num_tokens: int, changes: dict[str, int]) -> None:
    """A batch-1 row is polled; its combine is fused where heads have 64 elements or more. The number of layers is odd, so that
    vectors rotate through all three buffers.
    """
    config = tiny_config(**({"hidden_size": 192, "intermediate_size": 320} | changes), num_layers=3)
    ids = ",".join(str(7 * i % 300) for i in range(1, num_tokens + 1))
    prompts = ("--prompt-ids", ids, "--max-new-tokens", "4", "--max-model-len", "128")
    want = generate(runner, tmp_path, "host", 1, config=config, prompts=prompts)
    assert generate(runner, tmp_path, "emulated", num_ranks, config=config, prompts=prompts) == want
    assert len(want[0]) == 4


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("num_ranks", "head_dim", "lengths"), [(1, 64, (130, 140)), (1, 128, (300,))])
def test_long_contexts(runner: Runner, tmp_path: Path, num_ranks: int, head_dim: int, lengths: tuple[int, ...]) -> None:
    """K and V of many positions come through the pipeline, as weights do, for the head sizes that the kernel is compiled for."""
    config = tiny_config(hidden_size=192, intermediate_size=320, head_dim=head_dim)
    ids = [",".join(str((31 * i + 7 * k + 1) % 300) for k in range(length)) for i, length in enumerate(lengths)]
    prompts = ("--prompt-ids", *ids, "--max-new-tokens", "3", "--max-model-len", "512")
    want = generate(runner, tmp_path, "host", 1, config=config, prompts=prompts)
    assert generate(runner, tmp_path, "emulated", num_ranks, config=config, prompts=prompts) == want


def decode(
    backend: str,
    config: ModelConfig,
    lengths: tuple[int, ...],
    max_new: tuple[int, ...],
    num_workers: int,
    **options: int,
) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """(request, token) of prompts of these lengths, sorted, and the content of the Lamport vectors after the launch."""
    prompts = tuple(tuple((31 * i + 7 * k + 1) % 300 for k in range(length)) for i, length in enumerate(lengths))
    made = DecodeOptions(1, num_workers, max_model_len=64, **(backend_choices(backend) | options))
    with Session(lower_programs(build_model(config), made)[0], SingleBootstrap(5.0), backend=backend) as session:
        fill_weights(session.program, session.backend, 0, DummyCheckpoint(config, None, 5))
        running = session.launch(LaunchSpec(prompts=prompts, max_new=max_new, ignore_eos=True))
        tokens = sorted((event.request, event.token) for events in running for event in events)
        vectors = [b for b in session.program.placement.buffers if b.lamport and b.rows == MAX_ROWS]
        return tokens, {vector.name: session.view(vector).copy() for vector in vectors}


@pytest.mark.whole
@pytest.mark.parametrize(("max_seqs", "head_dim"), [(1, 64), (3, 32), (3, 64)])
def test_rows_behind_the_last_are_reset(max_seqs: int, head_dim: int) -> None:
    """The rows that an iteration has fewer than the one before are zero again, since a later iteration with more rows polls them
    before they are written. Prompts between steps of one row and of a few.
    """
    config = tiny_config(hidden_size=192, intermediate_size=320, head_dim=head_dim, num_layers=3)
    work: Any = (config, (8, 3, 12, 5, 6), (3, 4, 3, 2, 5), WORKERS)
    (tokens, vectors), (expected, _) = (decode(backend, *work, max_seqs=max_seqs) for backend in ("emulated", "host"))
    assert tokens == expected and len(tokens) == 17
    assert any(vector[0].any() for vector in vectors.values()) and len(vectors) > 8
    for name, rows in vectors.items():  # the last iteration had one row
        left = np.argwhere(rows[1:])
        assert not len(left), f"{name}: {len(left)} elements, first at row {1 + left[0][0]}, column {left[0][1]}"


@pytest.mark.whole
def test_a_batch_1_row_gets_too_many_splits_to_fuse_its_combine() -> None:
    """Its sequence grows while it decodes; then a combine of its own precedes the product. The next sequence begins anew."""
    config = tiny_config(hidden_size=64, intermediate_size=64, num_heads=3, num_kv_heads=1, head_dim=64, num_layers=3)
    work: Any = (config, (58, 1), (5, 3), 16)
    options = {"max_seqs": 1, "max_kv_splits": 16, "min_kv_split_len": 1}
    assert 58 < (2 * COMBINE_WIDTH - 1) * LONG_SPLITS * options["min_kv_split_len"] < 58 + 4
    (tokens, _), (expected, _) = (decode(backend, *work, **options) for backend in ("emulated", "host"))
    assert tokens == expected and len(tokens) == 8


@pytest.mark.whole
@pytest.mark.parametrize("max_seqs", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_reserved_workers(max_seqs: int) -> None:
    """More workers than a row's attention needs have no rows of qkv and o; combine tasks are theirs."""
    config = tiny_config(hidden_size=768, intermediate_size=768, num_heads=4, num_kv_heads=1, head_dim=64, num_layers=3)
    options: dict[str, Any] = {"max_seqs": max_seqs, "min_kv_split_len": 4, "loopback": True}
    made = DecodeOptions(1, NUM_WITH_RESERVED, max_model_len=64, **(backend_choices("emulated") | options))
    plan = plan_work(build_model(config), made)
    assert COMBINE_WIDTH < plan.roles.num_reserved == plan.o.first_worker == plan.qkv[0].first_worker
    assert plan.combine[0].first_worker == 0 and plan.combine[0].num_tasks <= plan.roles.num_reserved
    work: Any = (config, (8, 3, 5)[:max_seqs], (3, 2, 1)[:max_seqs], NUM_WITH_RESERVED)
    (tokens, _), (expected, _) = (decode(backend, *work, **options) for backend in ("emulated", "host"))
    assert tokens == expected and len(tokens) == (3 if max_seqs == 1 else 6)


def order_of_tasks(session: Session) -> list[tuple[int, int, int]]:
    """(iteration, task, worker) of a few iterations, in the order in which the tasks ended."""
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


def kernel_that_ends_badly(*arguments: str) -> list[str]:
    """The lines that the emulator prints about a kernel of deadlock.cpp before it aborts."""
    folder = csrc_dir() / "emulator"
    sources = [Path(__file__).with_name("deadlock.cpp"), folder / "fibers.cpp"]
    tool = build_sources("deadlock", "", [*EMULATOR_FLAGS, f"-I{folder / 'include'}"], sources, folder.rglob("*.h"))
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=20)
    assert done.returncode == -signal.SIGABRT, done
    return done.stderr.splitlines()


def test_threads_that_wait_for_each_other() -> None:
    assert kernel_that_ends_badly() == [
        "emulator: all threads wait for each other",
        "  block 0 warp 0: __syncthreads",
        "  block 0 warp 1: an mbarrier at shared 64",
        "  block 0 warp 2: vote",
    ]


def test_lanes_that_do_different_things() -> None:
    (line,) = kernel_that_ends_badly("diverge")
    assert re.fullmatch(r"emulator: block 0 thread \d+ is at __syncwarp, others of its warp or block at shuffle", line)


def test_more_arrivals_than_a_barrier_waits_for() -> None:
    assert kernel_that_ends_badly("arrive") == ["emulator: 2 arrivals at a barrier that waits for 1"]


ABORTS = """
import sys
from distmk.cli import main
from distmk.backends.host import backend

start = backend.HostLaunch.__init__

def start_far(self, made, block, params):
    if made.program.header.rank == 1:
        params.num_remote_ranks, made._bases[0] = 1, 0  # rank 0 is out of reach, and the emulator has no network
    start(self, made, block, params)

backend.HostLaunch.__init__ = start_far
sys.exit(main(sys.argv[1:]))
"""


def test_nothing_is_left_after_an_abort(runner: Runner, tmp_path: Path) -> None:
    done = runner.run(under_mpirun(2)([sys.executable, "-c", ABORTS, *generate_arguments(tmp_path, "emulated")]))
    assert done.status != 0 and "Aborted" in done.stderr, done
    runner.check_nothing_left()


@pytest.mark.parametrize(
    ("consumer", "nodes"),
    [
        ("layer0.o.reduce", {}),
        pytest.param("iteration barrier", {}, marks=pytest.mark.slow),
        pytest.param("iteration barrier", FAR, marks=pytest.mark.slow),
    ],
)
def test_signal_that_never_comes(runner: Runner, tmp_path: Path, consumer: str, nodes: dict[str, str]) -> None:
    source, target = (0, 1) if consumer == "iteration barrier" else (1, 0)
    sizes: Any = {"max_seqs": 4, "max_model_len": 64, "host_sizes": virtual_hosts(nodes, 2)}
    options = DecodeOptions(2, WORKERS, **sizes, **backend_choices("emulated"))
    event, waiter = event_between(
        compile_graph(*lower_programs(build_model(CONFIG), options)), source, target, consumer
    )
    fault = {"DISTMK_FAULT_DROP_SIGNAL": f"{source},{target},{event},4", "DISTMK_EMULATOR_SEED": SEED, **nodes}
    command = generate_arguments(tmp_path, "emulated", "--deadline", str(DEADLINE_S), "--ranks", "2")
    done = runner.distmk(*command, env=fault)
    check_hang(done, target, event, waiter, DEADLINE_S)
    runner.check_nothing_left()


def test_ends_while_the_loader_is_throttled(runner: Runner, tmp_path: Path) -> None:
    """Stages that the consumers of a batch-1 row took from the pipeline early are not released twice."""
    config = tiny_config(hidden_size=192, intermediate_size=1088, head_dim=32)
    options = DecodeOptions(1, WORKERS, max_seqs=1, max_model_len=64, **backend_choices("emulated"))
    event, waiter = event_between(compile_graph(*lower_programs(build_model(config), options)), 0, 0, "layer0.down")
    prompts, one = (
        ("--prompt-ids", "1", "--max-new-tokens", "8"),
        ("--max-num-seqs", "1", "--deadline", str(DEADLINE_S)),
    )
    command = generate_arguments(tmp_path, "emulated", *one, config=config, prompts=prompts)
    done = runner.distmk(*command, env={"DISTMK_FAULT_DROP_SIGNAL": f"0,0,{event},4", "DISTMK_EMULATOR_SEED": SEED})
    check_hang(done, 0, event, waiter, DEADLINE_S)
    runner.check_nothing_left()
