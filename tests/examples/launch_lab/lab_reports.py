"""A report of an imaginary GPU on which the rungs cost `COSTS`, so that everything derived from it is known."""

from __future__ import annotations

from lab.results import (
    ChainTime,
    DrainTimes,
    GemmTimes,
    LabReport,
    Latency,
    QueueTimes,
    ResidentTimes,
    Schedule,
)
from lab.stats import Spread

FEW, MANY = 20, 100
PURE_US = {1 << 13: 2.0, 1 << 16: 5.0, 1 << 18: 20.0, 1 << 21: 100.0}
# By rung: us per step, and us per kernel beside its own duration.
COSTS = {"1": (5.0, 12.0), "2": (8.0, 3.0), "3": (10.0, 1.0), "4": (6.0, -0.5), "5": (9.0, 2.0), "6": (7.0, 0.2),
         "7": (7.0, 1.5), "7f": (5.0, 13.0), "12": (0.0, 2.5)}  # fmt: skip
PREPARE_US = 200.0  # of any rung


def spread(value: float) -> Spread:
    return Spread.of([0.9 * value, value, 1.2 * value])


def chain_time(rung: str, num_elements: int, num_kernels: int) -> ChainTime:
    fixed, added = COSTS[rung]
    pure = PURE_US[num_elements]
    gap = 0.9 if rung in ("1", "2", "3", "5", "7") else None
    start = 900.0 if rung == "12" else None
    return ChainTime(
        rung, num_elements, num_kernels, spread(pure + added + fixed / num_kernels), pure, gap, PREPARE_US, 1e-7, start
    )


def report() -> LabReport:
    chain = [chain_time(rung, num, FEW) for num in PURE_US for rung in COSTS]
    chain += [chain_time(rung, 1 << 16, MANY) for rung in COSTS if rung != "12"]
    schedule = Schedule(spread(500.0), [300.0, 500.0, 100.0, 300.0], [4, 4, 4, 4])
    queue = Schedule(spread(320.0), [300.0, 310.0, 290.0, 300.0], [5, 3, 4, 4])
    ways = {
        name: Latency([us, us, 2 * us], spread(us), watts)
        for name, us, watts in (("resident", 4.0, 300.0), ("resident, backs off", 6.0, 200.0),
                                ("kernel launch", 9.0, 120.0), ("graph replay", 10.0, None))
    }  # fmt: skip
    return LabReport(
        machine={"gpu": "A GPU", "num_sms": 4, "driver": "1.2", "nvcc": "13.0", "cpu": "A CPU", "cores": 2},
        settings={"num_kernels": FEW, "many_kernels": MANY, "num_sines": 20, "targets_us": [2, 5, 20, 100]},
        chain=chain,
        queue=QueueTimes("gpu", schedule, queue, 1e-7),
        gemm=GemmTimes(256, 256, 64, {"a block a tile": spread(50.0), "torch": spread(20.0)}, 1e-3),
        drain=DrainTimes(100, 10, spread(80.0), spread(60.0), spread(3.0), 1e-7),
        resident=ResidentTimes(ways, 90.0, 1000.0, 1e-7),
        left_out={},
        seconds=1.0,
    )
