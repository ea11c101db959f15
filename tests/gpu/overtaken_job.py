"""What test_overtaken.py runs: a few launches of `graphs.overtaken`, from random values.

    python tests/gpu/overtaken_job.py BACKEND SEED       (with tests/ and the repository on PYTHONPATH)

Prints a JSON object a launch: values (of every buffer), wanted (by numpy, of those that depend on the dispatched task), ends
(the tasks of worker 0 that may overtake each other, in the order in which they ended).
"""

from __future__ import annotations

import json
import sys

import numpy as np
import numpy.typing as npt
from support import graphs, jobs

import distmk

ITERATIONS, LAUNCHES = 4, 3
SINGLE, OWN = 2, 3  # indices in program order
Values = npt.NDArray[np.float32]


def wanted(c: Values) -> dict[str, list[float]]:
    """The buffers after all iterations, computed from `c`."""
    for _ in range(ITERATIONS):
        a = np.float32(0.5) * c + np.float32(1)
        c = a
        for _ in range(graphs.SLOW):
            c = np.sin(c)
        c = c + np.float32(2)
    return {"a": a.tolist(), "c": c.tolist(), "d": (3 * a).tolist(), "e": (3 * a - 1).tolist()}


def main() -> None:
    backend, rng = sys.argv[1], np.random.default_rng(int(sys.argv[2]))
    with distmk.connect() as bootstrap, distmk.Session(graphs.overtaken(1, 2), bootstrap, backend=backend) as session:
        placed = {buffer.name: place for buffer, place in session.program.placement.buffers.items()}
        for _ in range(LAUNCHES):
            values = rng.uniform(-2, 2, graphs.COLS).astype(np.float32)
            session.backend.write(placed["c"], 0, values)
            trace = session.run_traced(ITERATIONS)
            assert trace is not None
            rows = np.sort(trace.rows, order="end_ns")
            ends = rows["order"][(rows["runner"] == 0) & np.isin(rows["order"], (SINGLE, OWN))].tolist()
            got = {name: session.view(name)[0].tolist() for name in "acde"}
            print(json.dumps({"values": got, "wanted": wanted(values), "ends": ends}), flush=True)


if __name__ == "__main__":
    jobs.run(main)
