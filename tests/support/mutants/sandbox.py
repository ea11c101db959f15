"""Runs programs on the host twin in a child process, in memory between guard pages, and says what became of it."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import pickle
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from support.mutants.programs import Subject, ranks_of

from distmk.abi import (
    BatcherState,
    Control,
    LaunchKind,
    LaunchParams,
    RowSample,
    SamplingFlag,
    SlotSampling,
    Space,
    WaitRecordABI,
    split_operand,
)
from distmk.backends.launch_block import LOGPROBS, LaunchBlock
from distmk.backends.launch_spec import LaunchSpec
from distmk.program.program import Program, decode_args
from distmk.tasks import TASK_TYPES
from distmk.tasks.slots import slots_for

Bytes = npt.NDArray[np.uint8]

GUARD_BYTES = 64 << 20  # of address space, without access, on both sides of a memory
PROT_NONE = 0
DEADLINE_S = 2.0  # of a wait
STEP_S = 30.0  # for a program: it does not come back from a body
NUM_ITERATIONS = 3  # of programs without scheduler step
PROMPTS = ((3, 3), (20, 2), (1, 3), (2, 4))  # length and new tokens of each
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """`num_bytes` of memory that ends at a page without access and begins less than a page behind one."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        used = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, used + 2 * GUARD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for guard in (start, start + GUARD_BYTES + used):
            if _libc.mprotect(guard, GUARD_BYTES, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.slack = (used - num_bytes) // 256 * 256  # the memory begins aligned to 256 bytes
        self.base = start + GUARD_BYTES + self.slack
        raw = (ctypes.c_uint8 * num_bytes).from_address(self.base)
        self.bytes: Bytes = np.ctypeslib.as_array(raw)

    def protect(self, begin: int, num_bytes: int, access: int) -> None:
        """Set the access to all pages with bytes [begin, begin + num_bytes)."""
        first = (self.base + begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if _libc.mprotect(first, self.base + begin + num_bytes - first, access):
            raise OSError(ctypes.get_errno(), "mprotect")


class Outcome(NamedTuple):
    """`images`: by space and rank, all memory behind a launch; `tokens`: published to the host. `abort`: why it ended early."""

    images: dict[tuple[int, int], Bytes]
    tokens: list[tuple[int, int, int]]
    abort: int


class Host:
    """What the host gives a launch: prompts that leave room for a token, and room for tokens."""

    def __init__(self, program: Program, decodes: bool) -> None:
        longest = max_positions(program) - 1 if decodes else 0
        lengths = [(min(length, longest), new) for length, new in PROMPTS] if longest > 0 else []
        prompts = tuple(tuple((7 * index + i) % 100 for i in range(n)) for index, (n, _) in enumerate(lengths))
        spec = LaunchSpec(prompts, tuple(new for _, new in lengths), ignore_eos=True, deadline_s=DEADLINE_S)
        self._block = LaunchBlock.of(spec, program.ranks[0])
        self.logprobs = self._block.logprobs = np.zeros(len(self._block.tokens), LOGPROBS)
        for entry, request in enumerate(self._block.requests):
            if entry % 2:
                drawn = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "flags": SamplingFlag.PENALTIES}
                request.sample, request.reports_logprobs = RowSample.DRAW, 1
                request.sampling = SlotSampling(**drawn, seed=entry, prompt_len=request.prompt_len)

    def fill(self, params: LaunchParams) -> None:
        """Point `params` here."""
        self._block.fill(params)

    def published(self) -> list[tuple[int, int, int]]:
        """Request, token and finish reason of every token."""
        return [(t.request, t.token, t.finish) for t in self._block.take_tokens()]


def max_positions(program: Program) -> int:
    """Positions of a sequence, by the scheduler step."""
    steps = _scheduler_steps(program)
    return int(steps[0].max_positions) if steps else 0


def times(program: Program) -> list[tuple[tuple[int, int], slice]]:
    """By memory, the bytes of the time and of the host's addresses that the batcher notes, which no two launches share."""
    found, field = [], BatcherState.beat_ns
    for args in _scheduler_steps(program):
        space, begin = split_operand(args.state)
        found.append(((int(space), 0), slice(begin + field.offset, begin + field.offset + field.size)))
        space, begin = split_operand(args.slots)
        for slot in range(slots_for(args.max_slots) if args.slots else 0):
            first = begin + slot * ctypes.sizeof(SlotSampling) + SlotSampling.tokens.offset
            found.append(((int(space), 0), slice(first, first + SlotSampling.tokens.size)))
    return found


def _scheduler_steps(program: Program) -> list[Any]:
    """The arguments of rank 0's scheduler steps."""
    return [decode_args(desc) for desc in program.ranks[0].tasks if desc.launch == LaunchKind.SCHEDULER]


def initial(subject: Subject, program: Program) -> dict[tuple[int, int], Bytes]:
    """The memory of all ranks before a launch: zeros where the launch zeroes it, 0x5A between allocations."""
    images = {}
    for rank, part in enumerate(program.ranks):
        heap = np.full(part.header.heap_bytes, 0x5A, np.uint8)
        images[(int(Space.HEAP), rank)] = heap
        images[(int(Space.LOCAL), rank)] = np.full(part.header.local_bytes, 0x5A, np.uint8)
    for piece, original in zip(program.placement.pieces, subject.program.placement.pieces, strict=True):
        for rank in ranks_of(piece, program.num_ranks):
            raw = subject.content.get((original.name, rank))
            if raw is not None:
                target = images[(int(piece.space), rank)][piece.offset : piece.offset + piece.num_bytes]
                target[: len(raw)] = raw[: len(target)]
    for rank, part in enumerate(program.ranks):
        images[(int(Space.HEAP), rank)][: part.header.zeroed_heap_bytes] = 0
    return images


def run(
    library: ctypes.CDLL,
    subject: Subject,
    program: Program,
    scheduler_threads: bool,
    deadline_s: float = DEADLINE_S,
    num_iterations: int = 0,
) -> Outcome:
    """One launch of all ranks in this process; `num_iterations`: only so many, and the launch is given up."""
    before = initial(subject, program)
    memories = {key: Guarded(len(image)) for key, image in before.items()}
    for key, image in before.items():
        memories[key].bytes[:] = image
    host = Host(program, subject.decodes)
    ranks = range(program.num_ranks)
    bases = (ctypes.c_uint64 * len(ranks))(*(memories[(int(Space.HEAP), rank)].base for rank in ranks))
    params = (LaunchParams * len(ranks))()
    kept: list[Any] = []
    for rank, part in enumerate(program.ranks):
        raw = part.to_bytes()
        code = Guarded(len(raw))
        code.bytes[:] = np.frombuffer(raw, np.uint8)
        records = (WaitRecordABI * (part.header.num_workers + part.header.num_schedulers))()
        kept += [code, records]
        p = params[rank]
        p.program, p.heap_bases = code.base, ctypes.addressof(bases)
        p.local_base = memories[(int(Space.LOCAL), rank)].base
        p.records, p.num_iterations, p.max_iterations = ctypes.addressof(records), NUM_ITERATIONS, num_iterations
        host.fill(p)
        p.deadline_ns, p.scheduler_threads, p.spin_polls = int(deadline_s * 1e9), int(scheduler_threads), 4
        if subject.node_size:
            p.fault.delay_puts_ns, p.fault.node_size, p.fault.seed = 20000, subject.node_size, 1
    launches = [ctypes.c_void_p() for _ in params]
    for p, launch in zip(params, launches, strict=True):
        library.distmk_start(ctypes.addressof(p), ctypes.addressof(launch))
    if num_iterations:
        while any(p.iterations_done < num_iterations for p in params):
            time.sleep(0.01)
        time.sleep(0.05)  # until all threads have left
        return Outcome(_images(program, memories), [], 0)
    for launch in launches:
        library.distmk_join(ctypes.addressof(launch))
    abort = max(Control.from_address(base).abort for base in bases)
    return Outcome(_images(program, memories), host.published(), abort)


def _images(program: Program, memories: dict[tuple[int, int], Guarded]) -> dict[tuple[int, int], Bytes]:
    images = {key: memory.bytes.copy() for key, memory in memories.items()}
    for place, part in times(program):
        images[place][part] = 0
    return images


def written(program: Program) -> dict[tuple[int, int], npt.NDArray[np.bool_]]:
    """The bytes that tasks declare to write, by space and rank."""
    found = {}
    for rank, part in enumerate(program.ranks):
        found[(int(Space.HEAP), rank)] = np.zeros(part.header.heap_bytes, bool)
        found[(int(Space.LOCAL), rank)] = np.zeros(part.header.local_bytes, bool)
    seen = set()
    for part in program.ranks:
        for desc in part.tasks:
            for each in TASK_TYPES[desc.type].accesses(decode_args(desc), part.header.rank, program.num_ranks):
                if each.write and each not in seen:
                    seen.add(each)
                    for row in range(each.num_rows):
                        begin = each.offset + row * each.stride
                        found[(each.space, each.rank)][begin : begin + each.row_bytes] = True
    return found


def differing(program: Program, a: Outcome, b: Outcome) -> list[str]:
    """Names of the allocations in which two outcomes differ; "tokens"."""
    names = [] if a.tokens == b.tokens else ["tokens"]
    for piece in program.placement.pieces:
        for rank in ranks_of(piece, program.num_ranks):
            key, part = (int(piece.space), rank), slice(piece.offset, piece.offset + piece.num_bytes)
            if not np.array_equal(a.images[key][part], b.images[key][part]):
                names.append(f"{piece.name}@{rank}")
    return names


def strays(subject: Subject, program: Program, outcome: Outcome) -> list[str]:
    """Bytes that changed though no task declares to write them."""
    before, declared, found = initial(subject, program), written(program), []
    for key, image in outcome.images.items():
        changed = (before[key] != image) & ~declared[key]
        if key[0] == Space.HEAP:
            first = min((p.offset for p in program.placement.pieces if p.space == Space.HEAP), default=len(image))
            changed[:first] = False  # control block, events and rings
        if changed.any():
            found.append(f"byte {int(np.flatnonzero(changed)[0])} of memory {key}")
    return found


def each_in_child(jobs: Sequence[Callable[[], Any]], step_s: float = STEP_S) -> Iterator[tuple[int, Any]]:
    """Results of `jobs`, run one after another in a child process. A job that kills the child gives a str; others go on in
    another child.
    """
    first = 0
    while first < len(jobs):
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            os.close(read_end)
            _serve(jobs[first:], write_end)
        os.close(write_end)
        done, why = 0, ""
        try:
            for result in _results(read_end, step_s):
                if isinstance(result, TimeoutError):
                    why = "does not come back"
                    break
                yield first + done, result
                done += 1
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            os.close(read_end)
        if first + done < len(jobs):
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            yield first + done, why or f"crashes ({signal.Signals(number).name if number else status})"
            done += 1
        first += done


def _serve(jobs: Sequence[Callable[[], Any]], out: int) -> None:
    faulthandler.disable()  # a crash is a result
    try:
        for job in jobs:
            raw = pickle.dumps(job())
            os.write(out, struct.pack("<I", len(raw)) + raw)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(70)
    os._exit(0)


def _results(source: int, step_s: float) -> Iterator[Any]:
    pending = b""
    until = time.monotonic() + step_s
    while True:
        ready, _, _ = select.select([source], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            yield TimeoutError()
            return
        more = os.read(source, 1 << 16)
        if not more:
            return
        pending += more
        while len(pending) >= 4 and len(pending) >= 4 + (size := struct.unpack("<I", pending[:4])[0]):
            yield pickle.loads(pending[4 : 4 + size])
            pending = pending[4 + size :]
            until = time.monotonic() + step_s
