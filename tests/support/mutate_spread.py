"""Random damage to the copies of spread tasks in an encoded program."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

from distmk.abi import LaunchKind, TaskDesc
from distmk.program.program import Program, RankProgram


def same_task(part: RankProgram, desc: TaskDesc) -> list[TaskDesc]:
    """All descriptors of a task: one, or for a spread task one a worker."""
    return [other for other in part.tasks if other.order == desc.order]


def queue_lists(part: RankProgram) -> list[list[int]]:
    """The descriptors in every worker's queue."""
    return [list(range(queue.begin, queue.begin + queue.count)) for queue in part.queues]


def rebuild(part: RankProgram, lists: list[list[int]]) -> None:
    """Replace the queues by `lists` of descriptors; descriptors in no queue stay behind them."""
    held = {index for queue in part.queues for index in range(queue.begin, queue.begin + queue.count)}
    rest = [index for index in range(len(part.tasks)) if index not in held]
    order = [index for queue in lists for index in queue] + rest
    tasks = (TaskDesc * len(order))(*(part.tasks[index] for index in order))
    part.task_names = [part.task_names[index] for index in order]
    begin = 0
    for queue, now in zip(part.queues, lists, strict=True):
        queue.begin, queue.count = begin, len(now)
        begin += len(now)
    for place, launched in enumerate(part.launches):
        part.launches[place] = begin + rest.index(launched)
    by = ctypes.sizeof(tasks) - ctypes.sizeof(part.tasks)
    for section in ("waits", "triggers", "queues", "launches"):
        field = f"{section}_offset"
        setattr(part.header, field, getattr(part.header, field) + by)
    part.header.program_bytes += by
    part.tasks, part.header.num_tasks = tasks, len(order)


class SpreadMutator:
    """Methods like those of `Mutator`."""

    def __init__(self, program: Program, random_: random.Random) -> None:
        self.program, self.random = program, random_

    def kinds(self) -> list[Callable[[], str]]:
        return [self.drop_copy, self.double_copy, self.change_copy, self.move_copies]

    def _copies(self) -> tuple[int, RankProgram, list[int]] | None:
        """The descriptors of a random spread task, by worker."""
        found: dict[tuple[int, int], list[int]] = {}
        for rank, part in enumerate(self.program.ranks):
            for index, desc in enumerate(part.tasks):
                if desc.launch == LaunchKind.SPREAD:
                    found.setdefault((rank, desc.order), []).append(index)
        if not found:
            return None
        (rank, _), copies = self.random.choice(list(found.items()))
        return rank, self.program.ranks[rank], copies

    def drop_copy(self) -> str:
        """Take a copy of a spread task from a worker's queue."""
        found = self._copies()
        if not found:
            return ""
        rank, part, copies = found
        gone = self.random.choice(copies)
        rebuild(part, [[index for index in queue if index != gone] for queue in queue_lists(part)])
        return f"drop_copy {gone} rank {rank}"

    def double_copy(self) -> str:
        """Put a second copy of a spread task into a queue."""
        found = self._copies()
        if not found:
            return ""
        rank, part, copies = found
        lists = queue_lists(part)
        queue = self.random.choice(lists)
        queue.insert(self.random.randint(0, len(queue)), self.random.choice(copies))
        rebuild(part, lists)
        return f"double_copy rank {rank}"

    def change_copy(self) -> str:
        """Change waits, triggers, arguments, first worker or task of one copy."""
        found = self._copies()
        if not found:
            return ""
        rank, part, copies = found
        desc, change = part.tasks[self.random.choice(copies)], self.random.randrange(5)
        if change < 2:
            field = ("num_waits", "num_triggers")[change]
            if not getattr(desc, field):
                return ""
            setattr(desc, field, getattr(desc, field) - 1)
        elif change == 2:
            desc.args[self.random.randrange(16)] ^= 4
        elif change == 3:
            desc.first_worker += 1
        else:
            desc.order += 1
        return f"change_copy {change} rank {rank}"

    def move_copies(self) -> str:
        """Move copies of a spread task within their queues, perhaps in front of tasks that they wait for."""
        found = self._copies()
        if not found:
            return ""
        rank, part, copies = found
        lists = queue_lists(part)
        for queue, copy in zip(lists, copies, strict=True):
            if self.random.random() < 0.7:
                queue.remove(copy)
                queue.insert(self.random.randint(0, len(queue)), copy)
        rebuild(part, lists)
        return f"move_copies rank {rank}"
