"""The megakernel picks the same tokens as the host twin, at any number of GPUs.

    python -m pytest -q -rs tests/gpu/test_cuda.py                   # as many GPUs as there are, half a minute each

Ranks that share a GPU take turns, or run side by side under MPS, so that one GPU is enough for tests of several:

    nvidia-cuda-mps-control -d
    DISTMK_RANKS_PER_GPU=4 python -m pytest -q -rs tests/gpu/test_cuda.py tests/tasks/test_bodies.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.helpers import Runner, alone, under_mpirun
from support.machine import FAR, environment, on, require, sharing

MODEL = ("--model", "smollm2-135m", "--load-format", "dummy")
# Few tokens: later ones of random weights lead by so little that rounding decides.
PROMPTS = ("--prompt-ids", "1,2,3,4", ",".join(map(str, range(5, 23))), "--max-new-tokens", "8", "--ignore-eos")


def tokens(
    runner: Runner, backend: str, num_ranks: int = 1, *more: str, env: dict[str, str] | None = None
) -> list[list[int]]:
    launcher = under_mpirun(num_ranks) if num_ranks > 1 else alone
    command = ("generate", *MODEL, *PROMPTS, "--json", "--backend", backend, *more)
    done = runner.distmk(*command, launcher=launcher, env=env or environment())
    assert done.status == 0, done.stderr
    return [record["token_ids"] for record in done.objects()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of the host twin."""
    folder: Path = tmp_path_factory.mktemp("host")
    return tokens(Runner(folder), "host")


@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [on("host", 2, slow=True), on("cuda", 1), *(on("cuda", n, num_ranks=n) for n in (2, 3, 4))],
)
def test_same_tokens(runner: Runner, request: pytest.FixtureRequest, backend: str, num_ranks: int) -> None:
    require(backend, num_ranks)
    assert tokens(runner, backend, num_ranks) == request.getfixturevalue("expected")


@pytest.mark.parametrize(
    ("backend", "num_ranks", "schedulers"),
    [on("host", 1, 1), on("cuda", 1, 1), on("cuda", 1, 12), on("cuda", 2, 3, num_ranks=2)],
)
def test_schedulers_of_their_own(
    runner: Runner, request: pytest.FixtureRequest, backend: str, num_ranks: int, schedulers: int
) -> None:
    """Schedulers apart from the workers: in threads, on a GPU on an SM."""
    require(backend, num_ranks)
    got = tokens(runner, backend, num_ranks, "--schedulers", str(schedulers))
    assert got == request.getfixturevalue("expected")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_ranks", "nodes"),
    [(2, {}), (2, FAR), (3, {"DISTMK_VIRTUAL_NODE_SIZE": "2"})],
    ids=["pointers", "nvshmem", "both"],
)
def test_ranks_that_share_a_gpu(
    runner: Runner, expected: list[list[int]], num_ranks: int, nodes: dict[str, str]
) -> None:
    require("cuda")
    assert tokens(runner, "cuda", num_ranks, env=sharing(num_ranks, **nodes)) == expected
