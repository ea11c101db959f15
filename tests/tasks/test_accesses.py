"""Every body touches what its task declares (`Task.accesses`), which is all that `check` knows, and nothing else.

DISTMK_TEST_SEED=7 python -m pytest -q tests/tasks/test_accesses.py     # the shapes of one run again
"""

from __future__ import annotations

import functools
import os
import random

import pytest
from support.mutants.moments import board_moment, decode_moment
from support.mutants.sandbox import each_in_child
from support.mutants.watched import Moment, accesses_of, field_of, watch

from distmk.backends.host.build import load_runtime
from distmk.tasks import TASK_TYPES

SEED = int(os.environ.get("DISTMK_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
KINDS = {
    "decode, 2 ranks": (0, 2, 4),
    "decode, fused combine": (1, 3),
    "decode, fused combine up to a length": (3,),
    "decode, layers that differ": (1, 3),
    "decode, spread attention, 2 ranks": (1, 3),
    "decode, tied embeddings, logits": (2,),
    "decode, loopback": (4,),
    "decode, factors left": (2,),
    "decode, 2 hosts": (1, 3),
    "decode, jobs": (1,),
}
MOMENTS = [*((kind, number) for kind, numbers in KINDS.items() for number in numbers), ("board", 1), ("board", 2)]
MAX_TASKS = 80  # of a moment, drawn at random
# Whatever bytes stand there instead, propose_drafts finds no room for drafts, or copies these bytes onto the same.
UNSEEN = {("propose_drafts", "read of drafts"), ("propose_drafts", "read of tables")}
MAX_TRIES = 8  # tasks of a moment that leave out the same access, until it is seen


@functools.cache
def moment(kind: str, number: int) -> Moment:
    return board_moment(SEED, number) if kind == "board" else decode_moment(load_runtime(), kind, number)


def tasks_of(of: Moment) -> list[tuple[int, int]]:
    """Rank and number of every descriptor."""
    return [(rank, index) for rank, part in enumerate(of.program.ranks) for index in range(len(part.tasks))]


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("kind", "number"), MOMENTS)
def test_bodies_touch_what_they_declare(kind: str, number: int) -> None:
    """`number`: the iteration that comes next, or ranks."""
    print(f"repeat with DISTMK_TEST_SEED={SEED}")
    of, library = moment(kind, number), load_runtime()
    tasks = tasks_of(of)
    tasks = random.Random(SEED).sample(tasks, min(MAX_TASKS, len(tasks)))
    jobs = [functools.partial(watch, library, of, rank, index) for rank, index in tasks]
    wrong = [
        f"{of.program.ranks[tasks[n][0]].task_names[tasks[n][1]]} (rank {tasks[n][0]}) {fault}"
        for n, fault in each_in_child(jobs)
        if fault
    ]
    assert not wrong, f"{len(wrong)} of {len(tasks)} tasks\n" + "\n".join(wrong[:12])


@pytest.mark.slow
def test_each_access_that_is_left_out_is_seen() -> None:
    """Without any one access of any type some task is seen to touch what it does not declare."""
    library = load_runtime()
    seen: dict[tuple[str, str], bool] = {}
    for kind, number in MOMENTS:
        of, tries = moment(kind, number), dict[tuple[str, str], list[functools.partial[str]]]()
        for rank, index in tasks_of(of):
            type_name = TASK_TYPES[of.program.ranks[rank].tasks[index].type].type_name
            for at, access in enumerate(accesses_of(of.program, rank, index)):
                name = (type_name, field_of(of.program, rank, index, access))
                if not seen.setdefault(name, False):
                    tries.setdefault(name, []).append(functools.partial(watch, library, of, rank, index, at))
        for attempt in range(MAX_TRIES):
            jobs = {
                name: of_name[attempt] for name, of_name in tries.items() if attempt < len(of_name) and not seen[name]
            }
            for (name, _), (_, fault) in zip(jobs.items(), each_in_child(list(jobs.values())), strict=True):
                seen[name] = bool(fault)
    on_host = {kind.type_name for kind in TASK_TYPES.values() if not kind.takes_packed_weights}
    assert {name for name, _ in seen} == on_host - {"nop"}
    missed = sorted(name for name, was in seen.items() if not was and name not in UNSEEN)
    assert not missed, f"not seen: {missed}"
