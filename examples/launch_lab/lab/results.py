"""What the lab found: one JSON file, lab.json."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distmk.errors import UsageError
from lab.stats import Spread

FILE = "lab.json"
FORMAT = 1

# Of a published run on one RTX 5070 Ti: a kernel's share of a step, in us, and what a launch added.
PUBLISHED = {"gpu": "RTX 5070 Ti", "1": 52.9, "3": 47.0, "4": 44.4, "7": 43.9, "overhead": 5.7}
PUBLISHED_US = 47.0  # the sweep has a kernel about as long

TITLES = {
    "1": "naive: wait for each",
    "2": "asynchronous",
    "3": "graph replay",
    "4": "fused",
    "5": "device launch",
    "6": "persistent",
    "7": "cooperative",
    "7f": "launch, sync, launch",
    "8": "work queue",
    "9": "persistent GEMM",
    "10": "drain and exit",
    "11": "resident",
    "12": "task graph",
}
CHAIN_RUNGS = ("1", "2", "3", "4", "5", "6", "7", "7f", "12")


@dataclass(frozen=True)
class ChainTime:
    """A rung's step of `num_kernels` kernels of `num_elements` elements.

    `kernel_us`: the step until the host knows that it is over, divided by its kernels. `busy_us`: of it, a kernel ran on
    the GPU; `gap_us`: between two kernels none did (of rung 12: a task's start after the end of what it waited for).
    `prepare_us`: what has to be done again where shapes change. `start_us`: of rung 12, whose steps follow each other in
    one launch, what that launch takes beside them. `error`: the largest of the results.
    """

    rung: str
    num_elements: int
    num_kernels: int
    kernel_us: Spread
    busy_us: float | None
    gap_us: float | None
    prepare_us: float
    error: float
    start_us: float | None = None


@dataclass(frozen=True)
class Dealing:
    """How items were dealt out: the whole, and each worker's share of one run (time busy, items)."""

    total_us: Spread
    busy_us: list[float]
    num_items: list[int]


@dataclass(frozen=True)
class QueueTimes:
    """Rung 8. `where`: gpu (workers are blocks) or host (threads)."""

    where: str
    static: Dealing
    queue: Dealing
    error: float


@dataclass(frozen=True)
class GemmTimes:
    """Rung 9: [m, k] times [k, n]; us of each way on the GPU, torch's own beside them."""

    m: int
    n: int
    k: int
    us: dict[str, Spread]
    error: float


@dataclass(frozen=True)
class DrainTimes:
    """Rung 10: us until all items that came in bursts were done, by a launch a burst and by a kernel that drains."""

    num_items: int
    num_bursts: int
    burst_us: Spread
    drain_us: Spread
    num_launches: Spread  # of the drain kernel
    error: float


@dataclass(frozen=True)
class Latency:
    """Rung 11, one way of submitting: us from submission to done, one by one; the board's mean power meanwhile."""

    us: list[float]
    spread: Spread
    watts: float | None


@dataclass(frozen=True)
class ResidentTimes:
    """Rung 11. `submissions_per_s` while power was measured; `idle_watts`: with nothing on the GPU."""

    ways: dict[str, Latency]
    idle_watts: float | None
    submissions_per_s: float
    error: float


@dataclass
class LabReport:
    """All of it. `machine`: hardware, driver, versions. `left_out`: rungs that did not run here, and why; `failed`: with
    a wrong result or an error.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    chain: list[ChainTime] = field(default_factory=list)
    queue: QueueTimes | None = None
    gemm: GemmTimes | None = None
    drain: DrainTimes | None = None
    resident: ResidentTimes | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    format: int = FORMAT

    @property
    def on_gpu(self) -> bool:
        return bool(self.machine.get("gpu"))

    @property
    def sizes(self) -> list[int]:
        """Elements of the kernels of the sweep, ascending."""
        return sorted({each.num_elements for each in self.chain})

    def at(self, rung: str, num_elements: int, num_kernels: int) -> ChainTime | None:
        found = (
            each
            for each in self.chain
            if (each.rung, each.num_elements, each.num_kernels) == (rung, num_elements, num_kernels)
        )
        return next(found, None)

    def pure_us(self, num_elements: int) -> float | None:
        """How long a plain kernel of that size runs: of the replayed graph, else of asynchronous launches."""
        num_kernels = int(self.settings["num_kernels"])
        for rung in ("3", "2", "1", "12"):
            found = self.at(rung, num_elements, num_kernels)
            if found and found.busy_us is not None:
                return found.busy_us
        return None

    def save(self, folder: Path) -> Path:
        """UsageError: it cannot be written."""
        path = folder / FILE
        try:
            path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
        return path

    @staticmethod
    def load(folder: Path) -> LabReport:
        """UsageError: there is none, or another version of the lab wrote it."""
        path = folder / FILE
        try:
            content = json.loads(path.read_text())
        except OSError:
            raise UsageError(
                f"there is no {path}; run distmk lab --out {folder} first, on the GPU in question"
            ) from None
        except ValueError as error:
            raise UsageError(f"{path} is no JSON ({error}); run distmk lab --out {folder} again") from None
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}, expected {FORMAT}")
            return _restored(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is not of this version ({error}); run distmk lab --out {folder} again") from None


def _restored(content: dict[str, Any]) -> LabReport:
    made = dict(content)
    made["chain"] = [ChainTime(**{**each, "kernel_us": Spread(**each["kernel_us"])}) for each in content["chain"]]
    if queue := content["queue"]:
        dealt = {
            name: Dealing(**{**queue[name], "total_us": Spread(**queue[name]["total_us"])})
            for name in ("static", "queue")
        }
        made["queue"] = QueueTimes(**{**queue, **dealt})
    if gemm := content["gemm"]:
        made["gemm"] = GemmTimes(**{**gemm, "us": {name: Spread(**each) for name, each in gemm["us"].items()}})
    if drain := content["drain"]:
        spreads = {name: Spread(**drain[name]) for name in ("burst_us", "drain_us", "num_launches")}
        made["drain"] = DrainTimes(**{**drain, **spreads})
    if resident := content["resident"]:
        ways = {
            name: Latency(**{**each, "spread": Spread(**each["spread"])}) for name, each in resident["ways"].items()
        }
        made["resident"] = ResidentTimes(**{**resident, "ways": ways})
    return LabReport(**made)
