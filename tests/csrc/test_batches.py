"""The scheduler step with a simulated host: every row comes once and in order, seeded rows by their program, and none starves."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.ranks_in_process import SANITIZERS, build_in_one, skips_without

from distmk.abi import MAX_PROGRAMS, MAX_ROWS, MAX_SEQUENCES

pytestmark = pytest.mark.timeout(120)

PAGE_SIZE, MAX_PAGES = 16, 16  # pages of the longest sequence
NUM_SCENARIOS = 100


@dataclass
class Asked:
    """A request, and how far it is. num_read: length of its prompt, with the tokens generated before it was put back."""

    step: int
    prompt_len: int
    max_new: int
    is_seeded: bool
    position: int = 0
    num_read: int = 0
    num_idle: int = 0  # iterations since its last turn
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
        """The program that must compute the next row of a seeded request."""
        if request.position >= request.prompt_len:
            return 0
        return next((i for i, most in enumerate(self.buckets) if most >= request.prompt_len), len(self.buckets) - 1)


def draw(rng: random.Random) -> Scenario:
    buckets = sorted(rng.sample([MAX_ROWS, 20, 24, 40, 64, 100, 200], rng.randint(2, MAX_PROGRAMS)))
    max_slots = rng.randint(1, rng.choice([buckets[0], min(buckets[-1], MAX_SEQUENCES)]))
    longest = PAGE_SIZE * MAX_PAGES
    share, pauses = rng.choice([0.1, 0.5, 0.9, 1.0]), rng.choice([[0, 0, 1], [0, 0, 0, 1, 5, 30]])
    step, requests = 0, []
    for _ in range(rng.randint(1, 100)):
        step += rng.choice(pauses)
        max_new = rng.randint(1, rng.choice([3, 60]))
        prompt_len = rng.randint(1, rng.choice([10, 50, longest - max_new]))
        requests.append(Asked(step, prompt_len, max_new, rng.random() < share))
    num_pages = rng.randint(MAX_PAGES, MAX_PAGES * max_slots)
    return Scenario(buckets, max_slots, num_pages, requests)


def check(scenario: Scenario, lines: list[str]) -> tuple[set[int], int]:
    """The programs that ran, and how often a sequence was put back."""
    programs, num_put_back = set(), 0
    requests = scenario.requests
    for request in requests:
        request.num_read = request.prompt_len
    for line in lines:
        kind, *numbers = line.split()
        values = list(map(int, numbers))
        if kind == "put_back":
            request, num_put_back = requests[values[0]], num_put_back + 1
            if request.is_decoding:
                request.num_read = request.position + 1  # and the token that the last row gave
            request.position = request.num_idle = 0
        elif kind == "end":
            assert values[1] == requests[values[0]].max_new
            requests[values[0]].ended = True
        else:
            program = int(kind)
            programs.add(program)
            check_runs(scenario, program, [values[at : at + 3] for at in range(0, len(values), 3)])
    assert all(request.ended for request in requests)
    return programs, num_put_back


def check_runs(scenario: Scenario, program: int, runs: list[list[int]]) -> None:
    """runs: the request, first position and number of rows (which may be 0) of every running sequence."""
    requests, most = scenario.requests, scenario.buckets[program]
    assert 0 < sum(num_rows for _, _, num_rows in runs) <= most
    assert len({identity for identity, _, _ in runs}) == len(runs) <= scenario.max_slots
    keeps = sum(requests[identity].is_seeded for identity, _, _ in runs) <= scenario.buckets[0]
    # num_kept: sequences that read here and keep to the program; num_others: decoding rows that do not keep to it.
    num_kept = num_others = 0
    for identity, position, num_rows in runs:
        request, what = requests[identity], f"request {identity}"
        assert position == request.position and not request.ended, what
        assert num_rows <= 1 or position + num_rows <= request.num_read, what
        is_kept, has_turn = request.is_seeded and keeps, num_rows > 0 or not request.is_decoding
        if is_kept:
            has_turn = program == scenario.program_of(request)
            num_kept += has_turn and not request.is_decoding
        elif request.is_decoding:
            num_others += num_rows
        for request.position in range(position, position + num_rows):
            assert not is_kept or program == scenario.program_of(request), f"row {request.position} of {what}"
        request.position = position + num_rows
        request.num_idle = 0 if has_turn else request.num_idle + 1
        assert request.num_idle < len(scenario.buckets), f"{what} has no turn"
    assert num_others <= most - num_kept, "no row is left for a seeded prompt"


def test_batches() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    flags = ["-std=c++20", "-O1", "-g1", "-pthread", "-Wall", *SANITIZERS["address"]]
    with skips_without("address"):
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
