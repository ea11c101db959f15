"""The measurements of the lab, saved as lab.json."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distmk.errors import UsageError
from distmk.user_files import read_whole, replacing
from lab.stats import Spread

FILE = "lab.json"
FORMAT = 1
MAX_BYTES = 64 << 20  # limit for a lab.json

# A published run on one RTX 5070 Ti: time per kernel by rung, and launch overhead per kernel, in us.
PUBLISHED = {"gpu": "RTX 5070 Ti", "1": 52.9, "3": 47.0, "4": 44.4, "7": 43.9, "overhead": 5.7}
PUBLISHED_US = 47.0  # duration of its kernels, near which the sweep has one too

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
    """Times of a rung's step of `num_kernels` kernels of `num_elements` elements.

    kernel_us: time per kernel of the step, which ends when the host knows that it is done.
    busy_us: time per kernel in which it runs on the GPU.
    gap_us: time between two kernels; for rung 12, from the last input of a task to its start.
    prepare_us: time to prepare the step again, as another shape requires.
    start_us: the cost of a launch; only for rung 12, which runs many steps in a launch.
    error: largest absolute error of the results.
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
class Schedule:
    """A schedule of rung 8: time of all items, and each worker's busy time and number of items in one run."""

    total_us: Spread
    busy_us: list[float]
    num_items: list[int]


@dataclass(frozen=True)
class QueueTimes:
    """Rung 8, static and dynamic schedule. `where`: gpu (workers are blocks) or host (workers are threads)."""

    where: str
    static: Schedule
    queue: Schedule
    error: float


@dataclass(frozen=True)
class GemmTimes:
    """Rung 9: GPU time in us of [m, k] times [k, n], by schedule; "torch" is torch's own product."""

    m: int
    n: int
    k: int
    us: dict[str, Spread]
    error: float


@dataclass(frozen=True)
class DrainTimes:
    """Rung 10: time until all items are done, with one launch per burst and with the drain kernel."""

    num_items: int
    num_bursts: int
    burst_us: Spread
    drain_us: Spread
    num_launches: Spread  # launches of the drain kernel, for all items
    error: float


@dataclass(frozen=True)
class Latency:
    """Rung 11, one way to submit: time of every submission until it is done, and mean board power."""

    us: list[float]
    spread: Spread
    watts: float | None


@dataclass(frozen=True)
class ResidentTimes:
    """Rung 11. `submissions_per_s`: while power was measured. `idle_watts`: board power with no kernel on the GPU."""

    ways: dict[str, Latency]
    idle_watts: float | None
    submissions_per_s: float
    error: float


@dataclass
class LabReport:
    """All measurements.

    `machine`: hardware, driver, versions. `left_out`: rungs that cannot run here, with the reason. `failed`: rungs with a
    wrong result or an error, with the message.
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
        """Elements per kernel of the measured chains, ascending."""
        return sorted({each.num_elements for each in self.chain})

    def at(self, rung: str, num_elements: int, num_kernels: int) -> ChainTime | None:
        """The times of a rung at one size; None if it was not measured."""
        found = (
            each
            for each in self.chain
            if (each.rung, each.num_elements, each.num_kernels) == (rung, num_elements, num_kernels)
        )
        return next(found, None)

    def pure_us(self, num_elements: int) -> float | None:
        """Duration of a plain kernel alone, in us: from the stamps of rung 3, else of rung 2, 1 or 12."""
        num_kernels = int(self.settings["num_kernels"])
        for rung in ("3", "2", "1", "12"):
            found = self.at(rung, num_elements, num_kernels)
            if found and found.busy_us is not None:
                return found.busy_us
        return None

    def save(self, folder: Path) -> Path:
        """Write lab.json and return its path. UsageError: it cannot be written."""
        path = folder / FILE
        try:
            with replacing(path) as file:
                file.write((json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
        return path

    @staticmethod
    def load(folder: Path) -> LabReport:
        """Read lab.json. UsageError: it is absent, or was written by another version of the lab."""
        path = folder / FILE
        try:
            content = json.loads(read_whole(path, MAX_BYTES, UsageError))
        except UsageError as error:
            raise UsageError(f"{error}; run distmk lab --out {folder} first, on the GPU in question") from None
        except (ValueError, RecursionError) as error:
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
        schedules = {
            name: Schedule(**{**queue[name], "total_us": Spread(**queue[name]["total_us"])})
            for name in ("static", "queue")
        }
        made["queue"] = QueueTimes(**{**queue, **schedules})
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
