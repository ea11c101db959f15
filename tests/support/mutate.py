"""Random damage to an encoded program, of the kinds that a bug in the compiler or a broken file would do."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections.abc import Callable

from support.mutate_spread import SpreadMutator, same_task

from distmk.abi import SPACE_SHIFT, LaunchKind, TaskDesc
from distmk.program.layout import Placed
from distmk.program.program import Program, RankProgram, decode_args

OPERANDS = {"src", "dst", "blocks", "x", "out", "batch", "weight", "qkv", "k_cache", "partials", "candidates", "table"}


class Mutator:
    """Each method damages `program` in place and returns a description; "" if it has nothing of that kind."""

    def __init__(self, program: Program, random_: random.Random) -> None:
        self.program, self.random = program, random_

    def mutate(self) -> str:
        """Make one random mutation that changes something; returns its description."""
        kinds: list[Callable[[], str]] = [
            self.drop_wait,
            self.drop_trigger,
            self.change_threshold,
            self.change_lag,
            self.reorder_queue,
            self.shrink_buffer,
            self.alias_buffers,
            self.misplace_operand,
            self.redirect_operand,
            self.drop_back_pressure,
            self.move_trigger_rank,
            self.move_heap_offset,
            self.swap_wait_events,
            self.drop_wait_and_count,
            *SpreadMutator(self.program, self.random).kinds(),
        ]
        self.random.shuffle(kinds)
        return next(done for done in (kind() for kind in kinds) if done)

    def _part(self) -> tuple[int, RankProgram]:
        rank = self.random.randrange(self.program.num_ranks)
        return rank, self.program.ranks[rank]

    def _task(self, field: str = "") -> tuple[int, RankProgram, TaskDesc] | None:
        """A random task; with `field`, one whose field is not zero."""
        found = [
            (rank, part, desc)
            for rank, part in enumerate(self.program.ranks)
            for desc in part.tasks
            if not field or getattr(desc, field)
        ]
        return self.random.choice(found) if found else None

    def drop_wait(self) -> str:
        found = self._task("num_waits")
        if not found:
            return ""
        rank, part, desc = found
        index = desc.wait_begin + self.random.randrange(desc.num_waits)
        self._drop(part.waits, index, desc.wait_begin + desc.num_waits - 1)
        for copy in same_task(part, desc):
            copy.num_waits -= 1
        return f"drop_wait rank {rank}"

    def drop_back_pressure(self) -> str:
        found = [
            (part, desc, desc.wait_begin + i)
            for part in self.program.ranks
            for desc in part.tasks
            for i in range(desc.num_waits)
            if part.waits[desc.wait_begin + i].lag
        ]
        if not found:
            return ""
        part, desc, index = self.random.choice(found)
        self._drop(part.waits, index, desc.wait_begin + desc.num_waits - 1)
        for copy in same_task(part, desc):
            copy.num_waits -= 1
        return "drop_back_pressure"

    def drop_trigger(self) -> str:
        found = self._task("num_triggers")
        if not found:
            return ""
        rank, part, desc = found
        index = desc.trigger_begin + self.random.randrange(desc.num_triggers)
        self._drop(part.triggers, index, desc.trigger_begin + desc.num_triggers - 1)
        for copy in same_task(part, desc):
            copy.num_triggers -= 1
        return f"drop_trigger rank {rank}"

    def drop_wait_and_count(self) -> str:
        """Drop a producer, and lower the counts of its waits to match: the counts agree, but an order is lost."""
        found = self._task("num_triggers")
        if not found:
            return ""
        _, part, desc = found
        index = desc.trigger_begin + self.random.randrange(desc.num_triggers)
        trigger = part.triggers[index]
        event, rank, amount = trigger.event, trigger.rank, trigger.amount
        copies = same_task(part, desc)
        massive = desc.launch == LaunchKind.MASSIVE
        times = desc.max_instances * part.header.num_schedulers if massive else len(copies)
        there = self.program.ranks[rank]
        for wait in there.waits:
            if wait.event == event and wait.count > amount * times:
                wait.count -= amount * times
        self._drop(part.triggers, index, desc.trigger_begin + desc.num_triggers - 1)
        for copy in copies:
            copy.num_triggers -= 1
        return f"drop_wait_and_count rank {rank} event {event}"

    @staticmethod
    def _drop(array: ctypes.Array[ctypes.Structure], index: int, last: int) -> None:
        kept = type(array[last]).from_buffer_copy(array[last])
        array[index] = kept

    def change_threshold(self) -> str:
        found = self._task("num_waits")
        if not found:
            return ""
        _, part, desc = found
        wait = part.waits[desc.wait_begin + self.random.randrange(desc.num_waits)]
        wait.count = max(0, wait.count + self.random.choice([-2, -1, 1, 2, 1000, 2**31]))
        return f"change_threshold to {wait.count}"

    def change_lag(self) -> str:
        found = self._task("num_waits")
        if not found:
            return ""
        _, part, desc = found
        wait = part.waits[desc.wait_begin + self.random.randrange(desc.num_waits)]
        wait.lag = self.random.choice([lag for lag in (0, 1, 1 - wait.lag, 2) if lag != wait.lag])
        return f"change_lag to {wait.lag}"

    def reorder_queue(self) -> str:
        _, part = self._part()
        queue = self.random.choice(list(part.queues))
        if queue.count < 2:
            return ""
        a, b = self.random.sample(range(queue.begin, queue.begin + queue.count), 2)
        kept = TaskDesc.from_buffer_copy(part.tasks[a])
        part.tasks[a] = part.tasks[b]
        part.tasks[b] = kept
        part.task_names[a], part.task_names[b] = part.task_names[b], part.task_names[a]
        return f"reorder_queue {a} {b}"

    def _replace_piece(self, old: Placed, new: Placed) -> None:
        placement = self.program.placement
        pieces = tuple(new if piece is old else piece for piece in placement.pieces)
        self.program.placement = dataclasses.replace(placement, pieces=pieces)

    def shrink_buffer(self) -> str:
        piece = self.random.choice(self.program.placement.pieces)
        cut = self.random.choice([4, 8, 16])
        if piece.row_bytes <= cut:
            return ""
        self._replace_piece(piece, dataclasses.replace(piece, row_bytes=piece.row_bytes - cut))
        return f"shrink_buffer {piece.name}"

    def alias_buffers(self) -> str:
        a, b = self.random.choices(self.program.placement.pieces, k=2)
        if a is b or a.space != b.space:
            return ""
        self._replace_piece(a, dataclasses.replace(a, offset=b.offset))
        return f"alias_buffers {a.name} {b.name}"

    def misplace_operand(self) -> str:
        found = self._task()
        if not found:
            return ""
        args = decode_args(found[2])
        fields = [name for name, *_ in args._fields_ if name in OPERANDS and getattr(args, name)]
        if not fields:
            return ""
        field = self.random.choice(fields)
        by = self.random.choice([-64, -16, -8, -4, 2, 4, 8, 16, 64, 4096, 1 << SPACE_SHIFT, 1 << 60])
        setattr(args, field, max(0, getattr(args, field) + by))
        return f"misplace_operand {field} by {by}"

    def redirect_operand(self) -> str:
        """Point an operand at another task's operand."""
        picked = [self._task(), self._task()]
        args = [decode_args(found[2]) for found in picked if found]
        fields = [[f for f, *_ in a._fields_ if f in OPERANDS and getattr(a, f)] for a in args]
        if not fields[0] or not fields[1]:
            return ""
        to, source = self.random.choice(fields[0]), self.random.choice(fields[1])
        if getattr(args[0], to) == getattr(args[1], source):
            return ""
        setattr(args[0], to, getattr(args[1], source))
        return f"redirect_operand {to} to {source}"

    def move_trigger_rank(self) -> str:
        found = self._task("num_triggers")
        if not found:
            return ""
        _, part, desc = found
        trigger = part.triggers[desc.trigger_begin + self.random.randrange(desc.num_triggers)]
        trigger.rank = self.random.choice([r for r in range(self.program.num_ranks + 1) if r != trigger.rank])
        return f"move_trigger_rank to {trigger.rank}"

    def move_heap_offset(self) -> str:
        rank, part = self._part()
        field = self.random.choice(
            ["events_heap_offset", "rings_heap_offset", "zeroed_heap_bytes", "heap_bytes", "jit_capacity"]
        )
        if self.program.num_ranks < 2:
            return ""
        setattr(part.header, field, getattr(part.header, field) * 2)
        return f"move_heap_offset {field} of rank {rank}"

    def swap_wait_events(self) -> str:
        _, part = self._part()
        held = [desc.wait_begin + i for desc in part.tasks for i in range(desc.num_waits)]
        if len(held) < 2:
            return ""
        a, b = (part.waits[i] for i in self.random.sample(held, 2))
        if a.event == b.event:
            return ""
        a.event, b.event = b.event, a.event
        if self.random.random() < 0.5:  # with thresholds that are right for the new events
            a.count, b.count = b.count, a.count
        return "swap_wait_events"
