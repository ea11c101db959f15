"""The memory that the host and a launch share: requests and commands, tokens, the trace, and waits that were not met."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distmk import abi
from distmk.abi import (
    EVENTS_PER_ROW,
    MAX_BANNED,
    MAX_BIASES,
    MAX_ROWS,
    Bias,
    Command,
    CommandKind,
    FinishReason,
    HostCounts,
    LaunchKind,
    LogprobRecord,
    PageRef,
    RequestEntry,
    RowSample,
    SlotSampling,
    TokenEvent,
    TraceEntry,
    WaitRecordABI,
)
from distmk.backends.launch_spec import LaunchSpec
from distmk.backends.memory_order import fence
from distmk.backends.token_masks import TokenMasks
from distmk.program.program import RankProgram, decode_args

ENTRY: np.dtype[Any] = np.dtype(TraceEntry)
TOKEN: np.dtype[Any] = np.dtype(TokenEvent)
BIAS: np.dtype[Any] = np.dtype(Bias)
PAGE: np.dtype[Any] = np.dtype(PageRef)
LOGPROBS: np.dtype[Any] = np.dtype(LogprobRecord)
MAX_KEPT_TOKENS = 4096  # tokens that the host has not read, in a launch to which requests are added
Entries = npt.NDArray[Any]  # elements are ENTRY


class RunnerRecords(NamedTuple):
    """The trace of one worker or scheduler in a launch: its last entries, oldest first; earlier ones are counted."""

    entries: Entries
    num_dropped: int


@dataclass(frozen=True)
class StuckWait:
    """A wait that had not been met when its launch was given up; `iteration` and `order` are its place in program order.

    `expired`: its own deadline passed; otherwise its worker was told to leave.
    """

    iteration: int
    order: int
    expired: bool
    worker: int
    task: str
    event: str
    want: int
    got: int


class Token(NamedTuple):
    """An element of the token ring (`abi.TokenEvent`). logprobs: of LOGPROBS, if the request asked for them."""

    request: int
    token: int
    finish: int
    iteration: int
    logprobs: Any = None

    @property
    def is_score(self) -> bool:
        """Whether the element is not a token, but the log probability of the next token of the prompt."""
        return self.token < 0 and self.finish == FinishReason.NONE


@dataclass
class LaunchBlock:
    """The host memory that a launch's parameters point to."""

    spec: LaunchSpec
    programs: Sequence[RankProgram]  # the programs of all row buckets
    requests: Any  # ctypes arrays of RequestEntry, Command and WaitRecordABI
    commands: Any
    records: Any
    prompts: npt.NDArray[np.int32]  # [requests, longest prompt], with drafts [requests, longest sequence + 1]
    eos_ids: npt.NDArray[np.int32]
    prefixes: npt.NDArray[Any]  # PAGE [requests, max_pages]: pages that may contain the beginning of a prompt
    pages: npt.NDArray[Any]  # PAGE [requests, 1 + max_pages]: see `abi.RequestEntry`
    biases: npt.NDArray[Any]  # BIAS [requests, MAX_BIASES + MAX_BANNED]: see `abi.SlotSampling`
    tokens: npt.NDArray[Any]  # TOKEN [tokens]
    logprobs: npt.NDArray[Any]  # LOGPROBS, one for each element of `tokens`; empty if requests are not added
    masks: TokenMasks  # of constrained requests
    trace: Entries  # [num_workers + num_schedulers, trace_capacity]
    trace_counts: npt.NDArray[np.uint64]
    counts: HostCounts = field(default_factory=HostCounts)
    num_commands: int = 0  # written so far
    prefixes_address: int = 0  # address at which the batcher finds `prefixes`
    pages_address: int = 0  # that of `pages`; 0: none
    biases_address: int = 0  # that of `biases`

    @staticmethod
    def of(spec: LaunchSpec, program: RankProgram, others: Sequence[RankProgram] = ()) -> LaunchBlock:
        """Allocate for a launch of `program` and the programs of other row buckets, and send its first requests."""
        num_runners = program.header.num_workers + program.header.num_schedulers
        num_requests = max(1, spec.num_requests, len(spec.prompts))  # an entry for each
        longest = max(1, spec.max_prompt_len, *map(len, spec.prompts), _drafted_len(program))
        # The batcher publishes only while the ring has room for a step that also cancels requests and puts some back.
        # The ring has room for all tokens of the first requests, so that nobody has to read while these run.
        num_tokens = max(sum(spec.max_new), MAX_KEPT_TOKENS if spec.num_requests else 0)
        num_tokens += EVENTS_PER_ROW * max(MAX_ROWS, _max_sequences(program))
        block = LaunchBlock(
            spec=spec,
            programs=(program, *others),
            requests=(RequestEntry * num_requests)(),
            commands=(Command * (2 * num_requests + 2))(),  # each is added and cancelled at most once, then the end
            records=(WaitRecordABI * num_runners)(),
            prompts=np.zeros((num_requests, longest), np.int32),
            eos_ids=np.array(spec.eos_ids or [0], np.int32),
            prefixes=np.zeros((num_requests, spec.max_pages), PAGE),
            pages=np.zeros((num_requests, 1 + spec.max_pages), PAGE),
            biases=np.zeros((num_requests, MAX_BIASES + MAX_BANNED), BIAS),
            tokens=np.zeros(num_tokens, TOKEN),
            logprobs=np.zeros(num_tokens if spec.num_requests else 0, LOGPROBS),
            masks=TokenMasks(num_requests, spec.vocab_size),
            trace=np.zeros((num_runners, spec.trace_capacity), ENTRY),
            trace_counts=np.zeros(num_runners, np.uint64),
        )
        for entry, (prompt, max_new) in enumerate(zip(spec.prompts, spec.max_new, strict=True)):
            block.write_request(entry, entry, prompt, max_new, spec.ignore_eos)
            block.send(CommandKind.ADD, entry, entry)
        if not spec.num_requests:
            block.send(CommandKind.FINISH)
        return block

    def write_request(
        self,
        entry: int,
        number: int,
        prompt: Sequence[int],
        max_new: int,
        ignore_eos: bool,
        *,
        num_output: int = 0,
        prefix: Sequence[tuple[int, int]] = (),
        sampling: tuple[SlotSampling, Sequence[Bias]] | None = None,
        draws: bool = True,
        num_scores: int = 0,
        is_constrained: bool = False,
    ) -> None:
        """Fill an entry of the request table.

        num_output: the number of generated ids at the end of the prompt.
        prefix: page and generation of cached pages with the beginning of the prompt, but not all of it.
        sampling: if None, or if it does not draw (`draws`), the best token is taken.
        num_scores: how many of the last tokens of the prompt proper are scored; this needs `sampling`.
        is_constrained: tokens are drawn by `masks`, with `sampling`.
        """
        self.prompts[entry, : len(prompt)] = prompt
        self.prefixes[entry, : len(prefix)] = np.array([tuple(page) for page in prefix], PAGE)
        self.requests[entry] = RequestEntry(
            id=number,
            prompt_len=len(prompt),
            max_new=max_new,
            ignore_eos=int(ignore_eos),
            num_output=num_output,
            num_prefix_pages=len(prefix),
            prefix=self.prefixes_address + entry * self.prefixes.strides[0],
            pages=self.pages_address and self.pages_address + entry * self.pages.strides[0],
            sample=RowSample.DRAW if sampling is not None and draws else RowSample.GREEDY,
            reports_logprobs=int(sampling is not None and draws and sampling[0].num_logprobs >= 0),
            num_scores=num_scores,
        )
        if sampling is not None:
            slot, biases = sampling
            slot.biases = self.biases_address + entry * self.biases.strides[0]
            self.biases[entry, : len(biases)] = np.array([(bias.token, bias.value) for bias in biases], BIAS)
            slot.mask = self.masks.clear(entry) if is_constrained else 0
            self.requests[entry].sampling = slot

    def cached_tokens(self, entry: int) -> int:
        """The number of a request's tokens that the batcher found cached, once the request has a token."""
        return int(self.pages["page"][entry, 0])

    def pages_of(self, entry: int, num_pages: int) -> list[tuple[int, int]]:
        """Page and generation of the first pages of a request, in the order of its tokens."""
        pages: list[tuple[int, int]] = self.pages[entry, 1 : 1 + num_pages].tolist()
        return pages

    def has_room(self, num_commands: int = 1) -> bool:
        """Whether `num_commands` more commands may be sent."""
        return int(self.num_commands - self.counts.commands_done) + num_commands <= len(self.commands)

    def send(self, kind: CommandKind, entry: int = 0, number: int = 0) -> None:
        """Send a command to the batcher, for which there must be room."""
        self.write_command(kind, entry, number)
        self.publish_commands()

    def write_command(self, kind: CommandKind, entry: int = 0, number: int = 0) -> None:
        """Write a command, for which there must be room.

        The batcher sees all written commands once `publish_commands` is called.
        """
        self.commands[self.num_commands % len(self.commands)] = Command(kind=kind, entry=entry, id=number)
        self.num_commands += 1

    def publish_commands(self) -> None:
        """Let the batcher see the written commands."""
        with fence:  # the count is stored after the commands
            self.counts.commands = self.num_commands

    def take_tokens(self) -> list[Token]:
        """The tokens published since the last call."""
        begin, end = self.counts.tokens_read, self.counts.tokens
        if begin == end:
            return []
        with fence:
            indices = np.arange(begin, end) % len(self.tokens)
            taken = [
                Token(request, token, finish, iteration, self.logprobs[index].copy() if has_logprobs else None)
                for index, (request, token, finish, has_logprobs, iteration) in zip(
                    indices, self.tokens[indices].tolist(), strict=True
                )
            ]
        self.counts.tokens_read = end
        return taken

    def fill(self, params: abi.LaunchParams) -> None:
        """Make `params` point at this block."""
        params.requests, params.prompts = ctypes.addressof(self.requests), self.prompts.ctypes.data
        params.commands, params.tokens = ctypes.addressof(self.commands), self.tokens.ctypes.data
        params.logprobs = self.logprobs.ctypes.data if self.logprobs.size else 0
        params.host_counts = ctypes.addressof(self.counts)
        self.prefixes_address = self.prefixes.ctypes.data
        self.pages_address = self.pages.ctypes.data if self.spec.max_pages else 0
        self.biases_address = self.biases.ctypes.data
        self.masks.address = self.masks.memory.ctypes.data
        params.keeps_cache = int(self.spec.keeps_cache)
        params.eos_ids, params.records = self.eos_ids.ctypes.data, ctypes.addressof(self.records)
        params.prompt_stride = self.prompts.shape[1]
        params.command_capacity, params.token_capacity = len(self.commands), len(self.tokens)
        params.num_eos = len(self.spec.eos_ids)
        params.num_iterations = self.spec.num_iterations
        params.deadline_ns = int(self.spec.deadline_s * 1e9)
        if self.spec.trace_capacity:
            params.trace, params.trace_counts = self.trace.ctypes.data, self.trace_counts.ctypes.data
            params.trace_capacity = self.spec.trace_capacity

    def traced(self) -> list[RunnerRecords]:
        """The trace of each worker, then of each scheduler, once the launch is over."""
        return [
            RunnerRecords(np.roll(ring, -count), count - len(ring))
            if count > len(ring)
            else RunnerRecords(ring[:count], 0)
            for ring, count in zip(self.trace, self.trace_counts.tolist(), strict=True)
        ]

    def stuck_waits(self) -> list[StuckWait]:
        """The waits that had not been met when the launch was given up, in program order."""
        waits = []
        for record in self.records:
            if not record.filled or record.event == abi.NO_EVENT or record.got >= record.want:
                continue  # told to leave while nothing was missing
            program = self.programs[record.program]
            task, order = "start of an iteration", -1
            if record.order != abi.NO_EVENT:
                task, order = f"{record.task} ({program.task_names[record.task]})", record.order
                if program.tasks[record.task].launch == LaunchKind.SCHEDULER:
                    order = -2  # the scheduler step precedes all other tasks
            event = f"{record.event} ({program.event_names[record.event]})"
            expired, worker = bool(record.expired), record.worker
            waits.append(StuckWait(record.iteration, order, expired, worker, task, event, record.want, record.got))
        return sorted(waits, key=lambda wait: (wait.iteration, wait.order))


def _drafted_len(program: RankProgram) -> int:
    """With drafts, where the kernel stores all tokens of a sequence behind its prompt, the most of these; else 0."""
    step = _scheduler_step(program)
    return int(step.max_positions) + 1 if step and step.drafts else 0


def _max_sequences(program: RankProgram) -> int:
    """The number of sequences that the scheduler step runs at once; 0 if the rank has no such step."""
    step = _scheduler_step(program)
    return int(step.max_slots) if step else 0


def _scheduler_step(program: RankProgram) -> Any:
    """The arguments of the rank's scheduler step; None if it has none."""
    return next((decode_args(desc) for desc in program.tasks if desc.launch == LaunchKind.SCHEDULER), None)
