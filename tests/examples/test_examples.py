"""The examples run under every launcher and are short."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.helpers import (
    QUICK_COMPILER,
    ROOT,
    Finished,
    Launcher,
    Runner,
    alone,
    under_mpirun,
    under_torchrun,
    with_ranks,
)
from support.machine import environment, num_gpus, on, require
from support.served import served

pytestmark = pytest.mark.timeout(150)

EXAMPLES = ROOT / "examples"


def like_the_demo(runner: Runner) -> dict[str, str]:
    """The environment of a job that finds no torch, which the demo does not install; with torch where GPUs need it."""
    found = environment()
    if num_gpus():
        return found
    hidden = runner.folder / "no_torch"
    hidden.mkdir(exist_ok=True)
    (hidden / "torch.py").write_text("raise ModuleNotFoundError('hidden by the test', name='torch')\n")
    return found | {"PYTHONPATH": os.pathsep.join([str(hidden), found["PYTHONPATH"]])}


def run(runner: Runner, name: str, launcher: Launcher, *arguments: str) -> Finished:
    command = launcher([sys.executable, str(EXAMPLES / name), *arguments])
    is_torchrun = "torch.distributed.run" in command
    finished = runner.run(command, environment() if is_torchrun else like_the_demo(runner))
    assert finished.status == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    return finished


def test_examples_are_short() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == ["allreduce.py", "decode.py", "linear.py", "own_model.py", "ring.py", "schema.py", "tools.py"]
    for name in names:
        assert len((EXAMPLES / name).read_text().splitlines()) < 80, name


@pytest.mark.parametrize(
    ("backend", "launcher", "num_ranks"),
    [
        ("auto", alone, 1),
        ("host", with_ranks(3), 3),
        ("host", under_mpirun(2), 2),
        on("cuda", under_mpirun(2), 2, num_ranks=2),
    ],
)
def test_ring(backend: str, launcher: Launcher, num_ranks: int, runner: Runner) -> None:
    require(backend, num_ranks)
    finished = run(runner, "ring.py", launcher, "--laps", "30", *("--backend", backend) * (backend != "auto"))
    total, where = 30 * num_ranks * (num_ranks + 1) // 2, "cuda" if num_gpus() else "host"
    where = where if backend == "auto" else backend
    assert finished.stdout == f"{num_ranks} ranks on {where}, 30 laps: {total}, expected {total}\n"


@pytest.mark.parametrize("launcher", [alone, under_mpirun(2)])
def test_a_mistake_is_one_line(launcher: Launcher, runner: Runner) -> None:
    arguments = ("--backend", "cuda") if not num_gpus() else ("--size", "0")
    finished = runner.run(launcher([sys.executable, str(EXAMPLES / "linear.py"), *arguments]), environment())
    ours = [line for line in finished.stderr.splitlines() if line.startswith("distmk: ")]
    assert finished.status == 2 and len(ours) == 1 and "Traceback" not in finished.stderr, finished.stderr


def errors_of(finished: Finished, backend: str) -> dict[str, float]:
    """The errors that the ranks printed, by rank."""
    # The other ranks of --ranks write to stderr, as stdout is rank 0's; under torchrun lines may run into each other.
    pattern = rf"rank (\d+)(?: of \d)? on {backend}[^:\n]*: \w+ error (\d\.\d+e[+-]\d\d)"
    return {rank: float(error) for rank, error in re.findall(pattern, finished.stdout + finished.stderr)}


@pytest.mark.parametrize(
    ("backend", "launcher", "num_ranks"),
    [("host", with_ranks(2), 2), ("emulated", under_torchrun(2), 2), on("cuda", alone, 1)],
)
def test_allreduce(backend: str, launcher: Launcher, num_ranks: int, runner: Runner) -> None:
    require(backend, num_ranks)
    finished = run(runner, "allreduce.py", launcher, "--elements", "5001", "--backend", backend)
    errors = errors_of(finished, backend)
    assert sorted(errors) == [str(rank) for rank in range(num_ranks)]
    assert all(error < 1e-5 for error in errors.values())


@pytest.mark.parametrize(
    ("backend", "launcher", "num_ranks"),
    [("host", with_ranks(2), 2), ("emulated", alone, 1), on("cuda", alone, 1)],
)
def test_linear(backend: str, launcher: Launcher, num_ranks: int, runner: Runner) -> None:
    """One script packs its matrix as each backend streams it."""
    require(backend, num_ranks)
    finished = run(runner, "linear.py", launcher, "--size", "200", "--backend", backend)
    errors = errors_of(finished, backend)
    assert sorted(errors) == [str(rank) for rank in range(num_ranks)]
    assert all(error < 1e-5 for error in errors.values())


def program_of(title: str, language: str = "python") -> str:
    """A program of examples/README.md."""
    section = (EXAMPLES / "README.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (program,) = re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return str(program)


def test_model_of_the_page(runner: Runner) -> None:
    """The program under "Your own model", in a file, as the second rank imports it."""
    (runner.folder / "own.py").write_text(program_of("Your own model"))
    finished = runner.run([sys.executable, str(runner.folder / "own.py")], like_the_demo(runner))
    assert finished.status == 0 and len(json.loads(finished.stdout)) == 64, finished


def test_graph_of_the_page(runner: Runner) -> None:
    """The program under "A graph of your own", as it stands there."""
    program = program_of("A graph of your own")
    assert len(program.splitlines()) < 20
    finished = runner.run([sys.executable, "-c", program], like_the_demo(runner))
    assert finished.stdout == f"on {'cuda' if num_gpus() else 'host'}: 3072\n", finished.stderr


def test_task_of_the_page(runner: Runner) -> None:
    """The two files under "A task type of your own", as they stand there."""
    for name, language in (("axpy.py", "python"), ("axpy.cpp", "cpp")):
        (runner.folder / name).write_text(program_of("A task type of your own", language))
    runner.timeout_s = 280  # it compiles the runtime
    finished = runner.run([sys.executable, "axpy.py"], like_the_demo(runner) | QUICK_COMPILER)
    assert finished.stdout == "10.0\n", finished.stderr


def test_decode(smollm2: Path, runner: Runner) -> None:
    """Streams the first prompt, then completes all three."""
    lines = run(runner, "decode.py", with_ranks(2), str(smollm2), "--backend", "host").stdout.splitlines()
    assert lines[0].startswith(" Paris")
    for prompt in ("The capital of France is", "Water boils at", "Once upon a time"):
        assert sum(line.startswith(f"{prompt!r} -> ") for line in lines) == 1
    assert re.fullmatch(r"on host, 2 ranks of \d+ workers", lines[-1])


@pytest.mark.parametrize(("launcher", "num_ranks"), [(with_ranks(2), 2), (under_torchrun(3), 3)])
def test_own_model(launcher: Launcher, num_ranks: int, runner: Runner) -> None:
    """Its weights make it say the last token again."""
    lines = run(runner, "own_model.py", launcher).stdout.splitlines()
    assert lines[:-1] == ["[7] -> [7, 7, 7, 7, 7]", "[1, 2, 3] -> [3, 3, 3, 3, 3]"]
    assert re.fullmatch(rf"on host, {num_ranks} ranks of \d+ workers", lines[-1])


def test_schema(smollm2: Path, runner: Runner) -> None:
    """Two conversations, whose answers it parses, and a choice."""
    lines = run(runner, "schema.py", with_ranks(2), str(smollm2), "--backend", "host").stdout.splitlines()
    assert len(lines) == 3 and all(" in " in line and ": " in line for line in lines[:2])
    assert re.fullmatch(r"The review 'I loved it' is (positive|negative)", lines[2])


def test_tools(runner: Runner) -> None:
    """Against a server whose model has no sense: it calls the function all the same."""
    with served(tool_call_parser="hermes") as server:
        finished = runner.run([sys.executable, str(EXAMPLES / "tools.py"), "--url", f"{server.url}/v1"], environment())
    assert finished.status == 0, finished.stderr
    assert re.match(r"get_weather\(\{.*\}\) -> .*: (18|64) degrees, rain\n", finished.stdout, re.DOTALL)
