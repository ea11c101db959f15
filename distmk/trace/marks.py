"""Marks: clocks that each consumer warp of a GPU records within a task, as a table.

The kernel records them if it is compiled with -DDISTMK_MARKS (csrc/device/core/marks.cuh). `scripts/step_marks.py` prints
the table of a decode step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from distmk.abi import K_TILES_PER_BLOCK, MARK_STEP_NS, MARK_WORDS, MARKED_TASKS, MARKED_WORKERS, Mark
from distmk.trace.record import family_of, layer_of
from distmk.trace.table import table

SHAPE = (MARKED_WORKERS, K_TILES_PER_BLOCK, MARKED_TASKS, MARK_WORDS)  # worker, warp, task, Mark
TIMES = tuple(Mark)[2:]

Words = npt.NDArray[np.uint32]
Times = npt.NDArray[np.float64]


class HasGlobals(Protocol):
    """A backend that can read a global variable of its kernel."""

    def read_global(self, name: str, num_bytes: int) -> bytes: ...


def read_marks(backend: HasGlobals, num_workers: int) -> Words:
    """uint32 [num_workers, warps, tasks, MARK_WORDS], the last axis indexed by `Mark`; 0: not recorded."""
    words = np.frombuffer(backend.read_global("distmk_marks", 4 * int(np.prod(SHAPE))), np.uint32)
    return words.reshape(SHAPE)[:num_workers]


@dataclass(frozen=True)
class MarkedTask:
    """A run of a task on a worker. `us`: float64 [warps, marks of TIMES], on one clock for all workers; nan: not recorded."""

    op: str
    layer: int
    runs_ago: int  # 0: the last run of this task, 1: the run before
    worker: int
    us: Times


def marked_tasks(words: Words, task_names: Sequence[str]) -> list[MarkedTask]:
    """The recorded tasks that belong to a layer: worker by worker, the latest run first."""
    origin = words[..., Mark.TIME].max()
    return [task for worker, mine in enumerate(words) for task in _of_worker(worker, mine, task_names, origin)]


def _of_worker(worker: int, words: Words, task_names: Sequence[str], origin: Any) -> Iterator[MarkedTask]:
    """`origin`: the reading of the GPU's timer that becomes 0 us."""
    slots = np.flatnonzero(words[0, :, Mark.TASK])
    entered_us = _signed(words[0, slots, Mark.TIME], origin) * MARK_STEP_NS / 1e3
    slots, entered_us = slots[np.argsort(-entered_us)], np.sort(entered_us)[::-1]
    if len(slots) < 2:
        return
    # The timer is read once for each task, the SM's clock at every mark. A linear fit between the two converts the
    # clocks.
    last = words[0, slots[0], Mark.ENTERED]
    us_of_clock = np.polyfit(_signed(words[0, slots, Mark.ENTERED], last), entered_us, 1)
    runs_ago: dict[int, int] = {}
    for slot in slots:
        task = int(words[0, slot, Mark.TASK]) - 1
        runs_ago[task] = runs_ago.get(task, -1) + 1
        clocks = words[:, slot, TIMES[0] : TIMES[-1] + 1]
        us = np.where(clocks == 0, np.nan, np.polyval(us_of_clock, _signed(clocks, last)))
        if (layer := layer_of(task_names[task])) >= 0:
            yield MarkedTask(family_of(task_names[task]), layer, runs_ago[task], worker, us)


def _signed(counters: Words, origin: Any) -> Times:
    """`counters` - `origin`, where the 32-bit counters may have wrapped."""
    differences: Times = (counters - np.uint32(origin)).astype(np.int32).astype(np.float64)
    return differences


def marks_report(tasks: Sequence[MarkedTask]) -> str:
    """A table of medians, with 10th and 90th percentiles, over workers, warps and layers.

    Times are microseconds since the first operator of the layer had its inputs (the median over its warps).
    """
    inputs = TIMES.index(Mark.INPUTS)
    by_op: dict[str, list[MarkedTask]] = {}
    for task in tasks:
        if np.isfinite(task.us[:, inputs]).any():
            by_op.setdefault(task.op, []).append(task)
    if not by_op:
        return "no marks: is the kernel compiled with -DDISTMK_MARKS?\n"
    first = min(by_op, key=lambda op: _after_layers_begin(by_op, op, inputs))
    begins = _begins(by_op[first], inputs)
    lines = []
    for op in sorted(by_op, key=lambda op: float(np.nanmedian(_relative(by_op[op], begins)[..., inputs]))):
        lines.append([op, str(len({task.worker for task in by_op[op]})), *_cells(_relative(by_op[op], begins))])
    head = ["op", "workers", *(mark.name.lower() for mark in TIMES)]
    title = f"warps in a layer: us from {first}'s inputs on, the median (10th to 90th of 100)"
    return table(title, head, lines)


def _begins(tasks: Sequence[MarkedTask], inputs: int) -> dict[tuple[int, int], float]:
    """For each layer and run: the median time at which the warps of these tasks had their inputs."""
    times: dict[tuple[int, int], list[Times]] = {}
    for task in tasks:
        times.setdefault((task.layer, task.runs_ago), []).append(task.us[:, inputs])
    return {key: float(np.nanmedian(np.concatenate(parts))) for key, parts in times.items()}


def _after_layers_begin(by_op: dict[str, list[MarkedTask]], op: str, inputs: int) -> float:
    """Median over layers of the time from the first inputs of any operator of the layer to the inputs of `op`."""
    begins = {each: _begins(tasks, inputs) for each, tasks in by_op.items()}
    mine = begins[op]
    return float(np.median([us - min(other.get(key, us) for other in begins.values()) for key, us in mine.items()]))


def _relative(tasks: Sequence[MarkedTask], begins: dict[tuple[int, int], float]) -> Times:
    """float64 [tasks, warps, marks]: times since the layer began. Tasks of layers whose beginning is unknown are left out."""
    relative = [task.us - begins[key] for task in tasks if (key := (task.layer, task.runs_ago)) in begins]
    return np.stack(relative) if relative else np.full((1, K_TILES_PER_BLOCK, len(TIMES)), np.nan)


def _cells(us: Times) -> list[str]:
    cells = []
    for mark in range(len(TIMES)):
        known = us[..., mark][np.isfinite(us[..., mark])]
        low, middle, high = np.percentile(known, [10, 50, 90]) if len(known) else (np.nan,) * 3
        cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})" if len(known) else "-")
    return cells
