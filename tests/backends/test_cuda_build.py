"""`distmk build` and its cache, with compilers that only count how often they are called."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.build_machine import Machine
from support.helpers import DISTMK, Runner, assert_one_line

from distmk.backends.cuda.build import ARCHITECTURES, architecture_of
from distmk.errors import UsageError


@pytest.fixture
def machine(runner: Runner) -> Machine:
    made = Machine(runner, runner.folder / "here", runner.folder / "calls")
    made.set_up()
    return made


def test_one_line_says_it_all(machine: Machine) -> None:
    finished = machine.build("--arch", "sm_90a", "--arch", "sm_80", "--arch", "sm_90a")
    assert (finished.status, finished.stderr, machine.num_calls()) == (0, "", 2)
    for name, line in zip(("sm_90a", "sm_80"), finished.stdout.splitlines(), strict=True):
        assert line.startswith(f"{name:<8} {machine.folder}/cache/cuda-{name}-")
        assert "168 registers, 286 bytes spilled, 1328 bytes of static shared memory, compiled in " in line
        assert line.endswith("by nvcc 13.0.88 with NVSHMEM unknown")


def test_list(machine: Machine) -> None:
    path = machine.path("sm_100a")
    for arguments in ((), ("--list",), ("--list", "--arch", "sm_80")):
        lines = machine.build(*arguments).stdout.splitlines()
        assert [line.split()[0] for line in lines] == list(ARCHITECTURES)
        assert [str(path) in line for line in lines] == [name == "sm_100a" for name in ARCHITECTURES]
        assert sum("not compiled yet" in line for line in lines) == len(lines) - 1
    assert machine.num_calls() == 1


def test_more_flags_make_another_kernel(machine: Machine) -> None:
    plain, checked = machine.path(), machine.path(env={"DISTMK_NVCC_FLAGS": "-DDISTMK_RACECHECK -g"})
    assert plain != checked
    assert ["-DDISTMK_RACECHECK -g" in call for call in machine.calls.read_text().splitlines()] == [False, True]
    assert machine.path() == plain and machine.num_calls() == 2


def test_processes_that_start_together_compile_once(machine: Machine) -> None:
    running = [machine.runner.start([*DISTMK, "build", "--arch", "sm_90a"], machine.env) for _ in range(4)]
    said = {machine.runner.finish(process).stdout for process in running}
    assert len(said) == 1 and machine.num_calls() == 1
    assert Path(said.pop().split()[1].rstrip(",")).read_text() == "a linked kernel\n"
    left = {path.suffix for path in (machine.folder / "cache").iterdir()}
    assert left == {".cubin", ".json", ".lock", ".sha256"}, "scratch folders are gone"


def test_cache_can_be_moved(machine: Machine, runner: Runner) -> None:
    """To a machine where the package, the tools and the cache lie elsewhere."""
    path = machine.path()
    there = Machine(runner, runner.folder / "there", machine.calls)
    there.set_up()
    shutil.copytree(machine.folder / "cache", there.folder / "cache")
    shutil.rmtree(machine.folder)
    assert there.path() == there.folder / "cache" / path.name
    assert machine.num_calls() == 1


def change_source(machine: Machine) -> None:
    with (machine.folder / "package" / "csrc" / "device" / "core" / "pipeline.cuh").open("a") as file:
        file.write("// a change\n")


def rename_source(machine: Machine) -> None:
    bodies = machine.folder / "package" / "csrc" / "device" / "linear"
    (bodies / "embed.cuh").rename(bodies / "zembed.cuh")


def change_flags(machine: Machine) -> None:
    path = machine.folder / "package" / "distmk" / "backends" / "cuda" / "build.py"
    path.write_text(path.read_text().replace('"-O3"', '"-O2"'))


def change_library(machine: Machine) -> None:
    machine.set_up(library="library B")


def change_header(machine: Machine) -> None:
    (machine.folder / "nvshmem" / "include" / "nvshmem.h").write_text("#error")


def change_nvcc(machine: Machine) -> None:
    machine.set_up(version="13.0, V13.0.89")


CHANGES = (change_source, rename_source, change_flags, change_library, change_header, change_nvcc)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_ingredient_is_in_the_key(change: object, machine: Machine) -> None:
    before = machine.path()
    assert callable(change)
    change(machine)
    assert machine.path() != before and machine.num_calls() == 2
    assert machine.path() != before and machine.num_calls() == 2, "cached this time"


def test_sources_of_the_host_twin_are_not_in_the_key(machine: Machine) -> None:
    before = machine.path()
    (machine.folder / "package" / "csrc" / "host" / "simd.h").write_text("#error")
    assert machine.path() == before and machine.num_calls() == 1


def test_kernels_are_used_where_nothing_can_be_compiled(machine: Machine) -> None:
    """From the cache, or from a folder of `--output`, unless they are of other sources."""
    output = machine.runner.folder / "output"
    finished = machine.build("--arch", "sm_90a", "--output", str(output))
    assert finished.stdout.split()[1].startswith(str(output))
    assert {path.suffix for path in output.iterdir()} == {".cubin", ".json", ".sha256"}
    machine.remove_tools()
    assert machine.path().parent == machine.folder / "cache"
    shutil.rmtree(machine.folder / "cache")
    assert_one_line(
        machine.build("--arch", "sm_90a"), "no kernel for sm_90a", "no nvcc", "--output", "DISTMK_CUBIN_DIR"
    )
    given = {"DISTMK_CUBIN_DIR": str(output)}
    assert machine.path(env=given).parent == output
    assert not (machine.folder / "cache").exists(), "nothing is made that is not needed"
    assert_one_line(machine.build("--arch", "sm_80", env=given), f"no kernel for sm_80 of this version in {output}")
    change_source(machine)
    assert_one_line(machine.build("--arch", "sm_90a", env=given), f"no kernel for sm_90a of this version in {output}")
    assert machine.num_calls() == 1


def test_a_given_kernel_comes_first(machine: Machine) -> None:
    output = machine.runner.folder / "output"
    machine.build("--arch", "sm_90a", "--output", str(output))
    assert machine.path(env={"DISTMK_CUBIN_DIR": str(output)}).parent == output
    assert machine.path(env={"DISTMK_CUBIN_DIR": str(output / "empty")}).parent == machine.folder / "cache"


def test_damaged_kernels_are_not_used(machine: Machine) -> None:
    """One of DISTMK_CUBIN_DIR is passed over, with a line that says why; one of the cache is compiled anew."""
    output = machine.runner.folder / "output"
    machine.build("--arch", "sm_90a", "--output", str(output))
    given = {"DISTMK_CUBIN_DIR": str(output)}
    path = machine.path(env=given)
    for damage, reason in (
        (lambda: path.write_text("a linked kernes\n"), "differs from its digest"),
        (lambda: path.chmod(0o666), "may be written by others"),
        (lambda: path.unlink() or os.mkfifo(path), "is a FIFO"),
        (lambda: output.chmod(0o777), f"{output} may be written by others"),
    ):
        damage()
        finished = machine.build("--arch", "sm_90a", env=given)
        assert finished.stdout.split()[1].startswith(str(machine.folder / "cache")) and reason in finished.stderr
        assert len(finished.stderr.splitlines()) == 1
    in_cache = machine.path()
    in_cache.write_text("")
    in_cache.with_suffix(".json").unlink()
    os.mkfifo(in_cache.with_suffix(".json"))
    finished = machine.build("--arch", "sm_90a")
    assert finished.stderr == f"distmk: {in_cache} differs from its digest; making it anew\n"
    assert "168 registers" in finished.stdout and machine.num_calls() == 2
    machine.remove_tools()
    shutil.rmtree(in_cache.parent)
    assert_one_line(machine.build("--arch", "sm_90a", env=given), f"{output} may be written by others", "no nvcc")


def test_mistakes(machine: Machine) -> None:
    """One line each."""
    assert_one_line(machine.build("--arch", "sm_70"), "'sm_70'", "sm_80", "sm_90a")
    assert_one_line(machine.build("--arch", "sm_90a", "--output", "/proc/kernels"), "cannot write /proc/kernels/")
    machine.set_up(version="12.9, V12.9.41")
    assert_one_line(machine.build("--arch", "sm_80"), "is of CUDA 12.9.41; 13.0 or newer is needed")
    (machine.folder / "bin" / "nvcc").write_text("#!/bin/sh\necho fatal: no license >&2\nexit 1\n")
    assert_one_line(machine.build("--arch", "sm_80"), "nvcc failed: fatal: no license")
    machine.set_up()
    (machine.folder / "nvshmem" / "lib" / "libnvshmem_device.a").unlink()
    assert_one_line(machine.build("--arch", "sm_80"), "no NVSHMEM device library", "NVSHMEM_HOME", "pip install")


def test_architecture_of_a_gpu() -> None:
    assert [architecture_of(each) for each in ((8, 0), (9, 0), (10, 0), (10, 3))] == list(ARCHITECTURES)
    for capability in ((7, 5), (8, 6), (8, 9), (12, 0)):
        with pytest.raises(UsageError, match=rf"capability {capability[0]}\.{capability[1]}; it runs on 8.0 \(A100"):
            architecture_of(capability)


def test_help(runner: Runner) -> None:
    text = runner.run([sys.executable, "-m", "distmk", "build", "--help"]).stdout
    assert all(option in text for option in ("--arch", "--list", "--output", *ARCHITECTURES))
