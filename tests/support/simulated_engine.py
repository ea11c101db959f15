"""An engine without a kernel, and callers that act at random wherever the engine's thread has left its lock.

It is a model of all interleavings. All happens on the engine's thread, inside the calls that it makes of its engine, so that a
seed repeats a run.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from distmk import SamplingParams
from distmk.abi import CommandKind, FinishReason
from distmk.backends.launch_block import LaunchBlock, Token
from distmk.backends.launch_spec import LaunchSpec
from distmk.engine.engine_thread import EngineThread
from distmk.engine.request import Request
from distmk.engine.request_queue import SubmittedBatch
from distmk.engine.token_output import TokenOutput
from distmk.errors import Interrupted, RankLostError

NUM_SLOTS, NUM_ENTRIES, MAX_TOKENS = 2, 3, 6
MOST_STEPS = 20_000


@dataclass(eq=False)
class Ticket:
    """A call or a task of the simulation, in the order of submission."""

    batch: SubmittedBatch | None = None  # None: a task
    result: Future[None] | None = None  # of a task
    num_ends: dict[int, int] = field(default_factory=dict)  # of each request, by the first token of its prompt
    started: set[int] = field(
        default_factory=set
    )  # requests that the launch has been given, and have no slot to wait for

    @property
    def is_served(self) -> bool:
        """Whether its turn has passed: it was done, or all of its requests have begun or have ended."""
        if self.batch is None:
            return self.result is not None and self.result.done()
        if self.batch.alone:
            return self.batch.ended.is_set()
        return all(number in self.started or ends for number, ends in self.num_ends.items())


class SimulatedEngine:
    """What an `EngineThread` needs of an engine. `faults`: whether launches may fail."""

    page_size, caches_prefixes, num_kv_pages, max_model_len = 16, False, 8, 64

    def __init__(self, callers: Callers, faults: bool) -> None:
        self.callers, self.faults = callers, faults
        self.running: SimulatedLaunch | None = None
        self.num_launches = 0
        self.shares = False  # the launch that is under way, or starts
        self.bootstrap = SimpleNamespace(
            losing_stopped_ranks=contextlib.nullcontext, send_command=self._send_command, silence=lambda: None
        )
        self.session = SimpleNamespace(stop=lambda: None)

    def _send_command(self, _: bytes) -> None:
        self.shares = self.callers.first_may_share()
        self.callers.act()

    def launch(self) -> SimulatedLaunch:
        self.callers.act()
        self.fail_at_random()
        assert self.running is None
        self.num_launches += 1
        self.running = SimulatedLaunch(self)
        self.callers.act()
        return self.running

    def gather(self, launch: SimulatedLaunch, gather_logits: bool) -> None:
        self.callers.act()

    def fail_at_random(self) -> None:
        if self.faults and self.callers.rng.random() < 0.03:
            raise RankLostError("rank 1 was lost")


class SimulatedLaunch:
    """A `RunningLaunch` and its kernel. An iteration gives each of at most NUM_SLOTS sequences a token."""

    keeps_cache = False

    def __init__(self, engine: SimulatedEngine) -> None:
        header: Any = SimpleNamespace(header=SimpleNamespace(num_workers=1, num_schedulers=1), tasks=[])
        self.block = LaunchBlock.of(LaunchSpec(num_requests=NUM_ENTRIES, max_prompt_len=64), header)
        self.launch: Any = SimpleNamespace(block=self.block, upload_request=lambda entry: None)
        self.is_over = False
        self._engine, self._callers = engine, engine.callers
        self._queue: list[tuple[int, int, int]] = []  # number, entry, tokens left; the first NUM_SLOTS run
        self._finishing = False

    @property
    def num_iterations(self) -> int:
        return int(self.block.counts.iterations)

    def poll(self, timeout_s: float) -> list[Token]:
        self._callers.step()
        tokens = self._take_commands()
        self._callers.act()
        self._engine.fail_at_random()
        return tokens + self._iterate()

    def _take_commands(self) -> list[Token]:
        ended = []
        counts, commands = self.block.counts, self.block.commands
        for index in range(counts.commands_done, counts.commands):
            command = commands[index % len(commands)]
            if command.kind == CommandKind.ADD:
                self._callers.given(int(self.block.prompts[command.entry, 0]))
                self._queue.append((command.id, command.entry, self.block.requests[command.entry].max_new))
            elif command.kind == CommandKind.CANCEL:
                kept = [one for one in self._queue if one[0] != command.id]
                if len(kept) < len(self._queue):
                    ended.append(Token(command.id, -1, FinishReason.ABORT, counts.iterations))
                self._queue = kept
            else:
                self._finishing = True
                self._callers.finishing(self._engine.shares)
        counts.commands_done = counts.commands
        self.is_over = self._finishing and not self._queue
        return ended

    def _iterate(self) -> list[Token]:
        counts, queue, tokens = self.block.counts, self._queue, []
        if not queue:
            return []
        counts.iterations += 1
        if len(queue) > 1 and self._callers.rng.random() < 0.1:
            number = queue.pop(min(len(queue), NUM_SLOTS) - 1)[0]
            tokens.append(Token(number, -1, FinishReason.PREEMPTED, counts.iterations))
        for number, _, left in queue[:NUM_SLOTS]:
            reason = FinishReason.NONE if left > 1 else FinishReason.LENGTH
            tokens.append(Token(number, 5, reason, counts.iterations))
        running = [(number, entry, left - 1) for number, entry, left in queue[:NUM_SLOTS] if left > 1]
        self._queue = [*running, *queue[NUM_SLOTS:]]
        counts.num_running = min(len(self._queue), NUM_SLOTS)
        return tokens

    def end(self, at_end: Callable[[], None]) -> None:
        self._callers.act()
        at_end()
        self._engine.running = None

    def stop(self) -> None:
        self._callers.act()
        self._engine.running = None


class Callers:
    """Submit, post and cancel at random, `num_actions` times, and judge what comes of it."""

    def __init__(self, seed: int, num_actions: int, *, leads: bool = True, faults: bool = False) -> None:
        self.rng = random.Random(seed)
        self._leads = leads
        self._num_actions = num_actions
        self._activity = self.rng.choice((0.05, 0.3, 0.7))
        self._alone_share, cancels = self.rng.choice((0.05, 0.3)), self.rng.choice((1, 6))
        self._weights = (6, 1, cancels)
        self._num_steps = 0
        self._tickets: list[Ticket] = []
        self._turn = 0  # of all tickets before this one the turn has passed
        self._requests: dict[int, tuple[Ticket, Request]] = {}  # by the first token of the prompt
        self._cancelled: set[int] = set()  # without a launch, so that no launch may be given them
        self.violations: list[str] = []
        self.engine = SimulatedEngine(self, faults)
        exit_after_s = self.rng.choice((0.0, 0.002, None))
        self.thread = EngineThread(self.engine, leads, exit_after_s)  # type: ignore[arg-type]
        self._really_rest = self.thread._changed.wait
        self.thread._changed.wait = self._rest  # type: ignore[assignment]

    @property
    def is_over(self) -> bool:
        """Whether all has been done, and all that was submitted has ended."""
        return not self._num_actions and all(
            ticket.is_served and all(ticket.num_ends.values()) for ticket in list(self._tickets)
        )

    def _rest(self, timeout_s: float) -> None:
        """The engine's thread has nothing to do."""
        if self._num_actions > 0:
            self.act_once()
        else:
            self._really_rest(timeout_s)

    def act(self) -> None:
        """Act a few times, or not at all."""
        while self._num_actions > 0 and self.rng.random() < self._activity:
            self.act_once()

    def act_once(self) -> None:
        """Submit something, or cancel a request in whatever state it is."""
        self._num_actions -= 1
        self.rng.choices((self._submit, self._post, self._cancel), self._weights)[0]()

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps > MOST_STEPS:
            self._num_actions = 0  # let it end
            self._judge(False, "the steady stream did not end")

    def _submit(self) -> None:
        alone = not self._leads or self.rng.random() < self._alone_share
        numbers = [len(self._requests) + index for index in range(self.rng.randrange(1, 4))]
        ticket = Ticket(num_ends=dict.fromkeys(numbers, 0))
        requests = []
        for index, number in enumerate(numbers):
            params = SamplingParams(max_tokens=self.rng.randrange(1, MAX_TOKENS), ignore_eos=True)
            requests.append(Request([number], params, index=index))
            self._requests[number] = (ticket, requests[-1])

        def deliver(output: TokenOutput | BaseException) -> None:
            if isinstance(output, TokenOutput):
                ticket.num_ends[numbers[output.index]] += output.finish_reason is not None
            else:  # one for each request that is not over
                number = next((each for each, ends in ticket.num_ends.items() if not ends), numbers[0])
                ticket.num_ends[number] += 1
            self.act()

        batch = ticket.batch = SubmittedBatch(requests, deliver, alone=alone)
        with self._ticket(ticket):
            self.thread.add(batch)

    def _post(self) -> None:
        ticket = Ticket()

        def task() -> None:
            self._judge(self.engine.running is None, "a task ran during a launch")
            self._judge(next(self._waiting(), None) is ticket, "a task has passed others, or was passed")
            self.act()

        with self._ticket(ticket):
            ticket.result = self.thread.call(task)

    @contextlib.contextmanager
    def _ticket(self, ticket: Ticket) -> Iterator[None]:
        """A ticket for what is submitted in the block, if it is taken."""
        self._tickets.append(ticket)
        try:
            yield
        except Interrupted:  # the engine's thread has been stopped
            self._tickets.remove(ticket)

    def _cancel(self) -> None:
        if self._requests:
            number = self.rng.choice(list(self._requests)[-12:])
            if self.engine.running is None:
                self._cancelled.add(number)
            self.thread.cancel(self._requests[number][1])

    def _waiting(self) -> Iterator[Ticket]:
        """Those whose turn has not passed, in the order of submission."""
        while self._turn < len(self._tickets) and self._tickets[self._turn].is_served:
            self._turn += 1
        yield from (ticket for ticket in self._tickets[self._turn :] if not ticket.is_served)

    def given(self, number: int) -> None:
        """The launch under way was given a request."""
        ticket, _ = self._requests[number]
        if number in ticket.started:
            return  # it was put back
        self._judge(next(self._waiting(), None) is ticket, f"request {number} has passed others")
        self._judge(number not in self._cancelled, f"request {number} was cancelled in vain")
        ticket.started.add(number)

    def first_may_share(self) -> bool:
        """Whether the first that waits is a call that may share a launch."""
        first = next(self._waiting(), None)
        return first is not None and first.batch is not None and not first.batch.alone

    def finishing(self, shares: bool) -> None:
        """The launch under way is told to end once it is empty."""
        self._judge(not (shares and self.first_may_share()), "a launch ends though the first call could join it")

    def _judge(self, is_right: bool, violation: str) -> None:
        if not is_right:
            self.violations.append(violation)

    def judge_ends(self) -> None:
        """Once all is over."""
        for ticket in self._tickets:
            self._judge(ticket.is_served, "a call or a task waits for ever")
            for number, ends in ticket.num_ends.items():
                self._judge(ends == 1, f"request {number} has {ends} ends")
