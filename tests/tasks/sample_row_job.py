"""What test_sample_row.py runs: many draws of every case of support.sampling_cases, and their logprobs.

    python tests/tasks/sample_row_job.py BACKEND SEED DRAWS SECTIONS

Prints a JSON object: counts (draws of every token, by case), the first tokens of every case, all tokens of the cases in PAIRED,
and of one position the logprobs.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from support import jobs
from support.sampling_board import SamplingBoard, make_slot
from support.sampling_cases import VOCAB, make_cases

import distmk
from distmk.abi import MAX_LOGPROBS

PAIRED = ("top_k", "ties")
NUM_WORKERS = {"host": 2, "emulated": 4, "cuda": 64}


def main() -> None:
    backend, (seed, num_draws, num_sections) = sys.argv[1], map(int, sys.argv[2:])
    cases = make_cases(np.random.default_rng(seed))
    num_batches = min(num_draws, 64 if backend != "emulated" else 16)
    board = SamplingBoard(VOCAB, num_sections, num_batches, NUM_WORKERS[backend])
    slots = [make_slot(case, seed + index) for index, case in enumerate(cases)]
    counts, first = np.zeros((len(cases), VOCAB), int), []
    paired: dict[str, list[int]] = {name: [] for name in PAIRED}
    with distmk.connect(1) as bootstrap, distmk.Session(board.graph, bootstrap, backend=backend) as session:
        board.fill(session, cases, slots)
        for position in range(0, num_draws, num_batches):
            board.run(session, position)
            drawn = board.tokens_drawn(session)
            for case, tokens in zip(counts, drawn.T, strict=True):
                np.add.at(case, tokens, 1)
            for row, case_of_row in enumerate(cases):
                if case_of_row.name in paired:
                    paired[case_of_row.name] += drawn[:, row].tolist()
            first = first or drawn.T.tolist()
        for slot, num in zip(slots, range(len(slots)), strict=True):
            slot.num_logprobs = min(num + 5, MAX_LOGPROBS)
        board.fill(session, cases, slots)
        board.run(session, 0)
        records = board.records_of(session)[0]
    names = records.dtype.names
    found = [{name: record[name].tolist() for name in names} for record in records]
    print(
        json.dumps({"counts": counts.tolist(), "first": first, "paired": paired, "records": found}).replace(
            "-Infinity", "-1e999"
        )
    )


if __name__ == "__main__":
    jobs.run(main)
