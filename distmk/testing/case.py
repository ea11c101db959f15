"""A graph that is run and compared with its tasks' oracles, on one or several ranks. Each rank is a process."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from distmk.bootstrap import Bootstrap
from distmk.engine.session import Session
from distmk.errors import UsageError, shown
from distmk.graph.regions import Region
from distmk.testing.arrays import assert_close
from distmk.testing.build import Build
from distmk.testing.launches import Launches, byte_cols, launch_twice
from distmk.testing.simulation import Simulation, as_tensor

TOLERANCES = {"f32": (1.3e-6, 1e-5), "bf16": (1.6e-2, 1e-5), "i32": (0.0, 0.0), "u8": (0.0, 0.0)}
"""Relative and absolute, by dtype, as torch.testing.assert_close has them."""


@dataclass(frozen=True)
class Case:
    """The case that all ranks run. rtol, atol: for floating-point numbers (None: `TOLERANCES`)."""

    backend: str
    num_iterations: int
    seed: int
    rtol: float | None = None
    atol: float | None = None

    def run(self, build: Build, bootstrap: Bootstrap) -> list[str]:
        """The faults of this rank, each one line or more. Collective."""
        made = build(np.random.default_rng(self.seed))
        graph, inputs = made if isinstance(made, tuple) else (made, {})
        simulation = Simulation(graph, np.random.default_rng(self.seed), inputs)
        given = {buffer: content for (rank, buffer), content in simulation.given.items() if rank == bootstrap.rank}
        simulation.run(self.num_iterations)
        written = {buffer: rows for (rank, buffer), rows in simulation.written.items() if rank == bootstrap.rank}
        with Session(graph, bootstrap, backend=self.backend) as session:
            rng = np.random.default_rng([self.seed, bootstrap.rank])
            launches = launch_twice(session, graph, rng, given, self.num_iterations)
        wrong = [f"{each.kind}, {each.what}: {each.error}" for each in launches.check(written) if each.error]
        return [*self._compare(simulation, launches), *wrong]

    def _compare(self, simulation: Simulation, launches: Launches) -> Iterator[str]:
        """Compare the regions that tasks wrote on this rank with the regions that their oracles wrote."""
        rank, buffers = launches.memory.rank, launches.buffers
        writers: dict[Region, list[str]] = {}
        for task in simulation.graph.tasks:
            for region in task.writes():
                writers.setdefault(region, []).append(task.op)
        for region, ops in writers.items():
            if region.rank != rank:
                continue
            spans = simulation.written[rank, region.buffer]
            num_rows = max(rows.stop for rows, cols in spans if cols == byte_cols(region))
            got = as_tensor(buffers[region.buffer][:num_rows, byte_cols(region)], region.buffer.dtype).double()
            want = simulation.content(region, num_rows).double()
            try:
                assert_close("row, column ", got, want, self._tolerance(region, want))
            except AssertionError as error:
                yield f"{region}, written by {', '.join(dict.fromkeys(ops))}: {error}"

    def _tolerance(self, region: Region, want: torch.Tensor) -> torch.Tensor:
        rtol, atol = TOLERANCES[region.buffer.dtype]
        if region.buffer.dtype in ("f32", "bf16"):
            rtol, atol = rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol
        return atol + rtol * want.abs()


def follower_argv(case: Case, build: Build) -> list[str]:
    """The command of the other ranks, which import `build` by its name. UsageError: they cannot import it."""
    name = getattr(build, "__qualname__", None) or shown(build)
    if "<" in name:
        raise UsageError(f"{name} cannot be imported by the other ranks; define it at the top of a module")
    module = sys.modules[build.__module__]
    where = {"file": getattr(module, "__file__", None), "module": build.__module__, "name": name}
    text = json.dumps({"case": dataclasses.asdict(case), "path": sys.path, **where})
    return [sys.executable, "-m", "distmk.testing", text]


def read_follower(text: str) -> tuple[Case, Build]:
    """Read back the case and the function that `follower_argv` encoded."""
    given = json.loads(text)
    sys.path[:] = given["path"]
    spec = importlib.util.find_spec(given["module"]) if given["module"] != "__main__" else None
    if spec is not None and spec.origin == given["file"]:
        module = importlib.import_module(given["module"])
    else:  # a script, or a test that pytest imports by its path
        spec = importlib.util.spec_from_file_location("distmk_testing_case", given["file"])
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return Case(**given["case"]), getattr(module, given["name"])
