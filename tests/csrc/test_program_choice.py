"""The program of the next iteration: the smallest row bucket that holds its rows; or each in turn, if several are wanted."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from support.ranks_in_process import build_in_one

from distmk.abi import MAX_BUCKET_ROWS, MAX_PROGRAMS, MAX_ROWS

pytestmark = pytest.mark.timeout(120)


def test_program_choice() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng, questions, answers = random.Random(seed), [], []
    for _ in range(3000):
        num_programs = rng.randint(1, MAX_PROGRAMS)
        buckets = sorted(rng.sample(range(MAX_ROWS, MAX_BUCKET_ROWS + 1), num_programs))
        own, has_transport = rng.randrange(num_programs), rng.random() < 0.1
        num_rows = rng.choice([rng.randint(0, 2 * MAX_BUCKET_ROWS), rng.choice(buckets) + rng.randint(-1, 1)])
        wanted = rng.sample(range(num_programs), rng.randint(1, num_programs))
        questions.append((own, int(has_transport), num_rows, sum(1 << each for each in wanted), num_programs, *buckets))
        holding = [program for program, most in enumerate(buckets) if most >= num_rows]
        best = own if has_transport else min(holding, default=num_programs - 1)
        # If programs have their turns in ascending order, this one has waited longest.
        answers.append((best, min(wanted, key=lambda program: (program - own - 1) % num_programs), 1))
    tool = build_in_one(
        "choose_program", ["-std=c++20", "-O1", "-pthread", "-Wall"], [Path(__file__).with_name("choose_program.cpp")]
    )
    given = "\n".join(" ".join(map(str, question)) for question in questions)
    told = subprocess.run([tool], input=given, capture_output=True, text=True, timeout=60, check=True).stdout
    found = [tuple(map(int, line.split())) for line in told.splitlines()]
    assert len(found) == len(answers)
    for question, got, want in zip(questions, found, answers, strict=True):
        assert got == want, f"{question}: {got}, expected {want}"
