"""The scheduler step, alone with a host: rows in order, each once; seeded rows by their program; and every sequence goes on."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.ranks_in_process import build_in_one

from distmk.abi import MAX_PROGRAMS, MAX_ROWS

pytestmark = pytest.mark.timeout(120)

PAGE_SIZE, MAX_PAGES = 16, 16  # of the longest sequence
NUM_SCENARIOS = 60


@dataclass
class Asked:
    """A request, and how far it is. num_read: its prompt, with what it had generated when it was put back."""

    step: int
    prompt_len: int
    max_new: int
    is_seeded: bool
    position: int = 0
    num_read: int = 0
    ran: list[int] = field(default_factory=list)  # the iterations since it was put back
    ended: bool = False

    @property
    def is_decoding(self) -> bool:
        return self.position >= self.num_read


@dataclass
class Scenario:
    buckets: list[int]
    max_slots: int
    num_pages: int
    requests: list[Asked]

    def __str__(self) -> str:
        requests = [f"{r.step} {r.prompt_len} {r.max_new} {int(r.is_seeded)}" for r in self.requests]
        sizes = [self.max_slots, self.num_pages, PAGE_SIZE, MAX_PAGES, len(requests)]
        return " ".join(map(str, [len(self.buckets), *self.buckets, *sizes, *requests]))

    def program_of(self, request: Asked) -> int:
        """The program of the next row of a seeded request, by what the rule promises."""
        if request.position >= request.prompt_len:
            return 0
        return next((i for i, most in enumerate(self.buckets) if most >= request.prompt_len), len(self.buckets) - 1)


def draw(rng: random.Random) -> Scenario:
    buckets = sorted(rng.sample([MAX_ROWS, 20, 24, 40, 64, 100, 200], rng.randint(2, MAX_PROGRAMS)))
    max_slots = rng.randint(1, buckets[0])
    longest = PAGE_SIZE * MAX_PAGES
    share, step, requests = rng.choice([0.2, 0.5, 0.9, 1.0]), 0, []
    for _ in range(rng.randint(1, 60)):
        step += rng.choice([0, 0, 0, 1, 5, 30])
        max_new = rng.randint(1, rng.choice([3, 60]))
        prompt_len = rng.randint(1, rng.choice([10, 50, longest - max_new]))
        requests.append(Asked(step, prompt_len, max_new, rng.random() < share))
    num_pages = rng.randint(MAX_PAGES, MAX_PAGES * max(1, max_slots // rng.choice([1, 3])))
    return Scenario(buckets, max_slots, num_pages, requests)


def check(scenario: Scenario, lines: list[str]) -> tuple[set[int], int]:
    """The programs that ran, and how often a sequence was put back."""
    programs, num_put_back, number = set(), 0, 0
    requests = scenario.requests
    for request in requests:
        request.num_read = request.prompt_len
    for line in lines:
        kind, *numbers = line.split()
        values = list(map(int, numbers))
        if kind == "put_back":
            request, num_put_back = requests[values[0]], num_put_back + 1
            if request.is_decoding:
                request.num_read = request.position + 1  # and the token behind the last row
            request.position, request.ran = 0, []
        elif kind == "end":
            assert values[1] == requests[values[0]].max_new
            requests[values[0]].ended = True
        else:
            number, program = number + 1, int(kind)
            programs.add(program)
            check_runs(scenario, program, number, [values[at : at + 3] for at in range(0, len(values), 3)])
    assert all(request.ended for request in requests)
    return programs, num_put_back


def check_runs(scenario: Scenario, program: int, number: int, runs: list[list[int]]) -> None:
    assert 0 < sum(num_rows for _, _, num_rows in runs) <= scenario.buckets[program]
    assert len({identity for identity, _, _ in runs}) == len(runs)
    for identity, position, num_rows in runs:
        request = scenario.requests[identity]
        assert position == request.position and not request.ended, f"request {identity}"
        assert num_rows == 1 or position + num_rows <= request.num_read, f"request {identity}"
        if request.is_seeded:
            expected = scenario.program_of(request)
            assert program == expected, f"row {position} of request {identity}"
            request.position += num_rows - 1
            assert scenario.program_of(request) == expected, f"row {request.position} of request {identity}"
            request.position += 1
        else:
            request.position += num_rows
        if request.is_decoding and request.ran and position >= request.num_read:
            pause = number - request.ran[-1]
            assert pause <= 2 * len(scenario.buckets), f"request {identity} stood still for {pause} iterations"
        request.ran.append(number)


def test_batches() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    flags = ["-std=c++20", "-O1", "-g1", "-pthread", "-Wall", "-fsanitize=address,undefined"]
    tool = build_in_one("simulate_batches", flags, [Path(__file__).with_name("simulate_batches.cpp")])
    num_programs, num_put_back = 0, 0
    for _ in range(NUM_SCENARIOS):
        scenario = draw(rng)
        given = str(scenario)
        ran = subprocess.run([tool], input=given, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, f"{given}\n{ran.stdout[-2000:]}{ran.stderr}"
        programs, put_back = check(scenario, ran.stdout.splitlines())
        num_programs, num_put_back = max(num_programs, len(programs)), num_put_back + put_back
    assert num_programs > 3 and num_put_back > 0
