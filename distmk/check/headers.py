"""Every rank's header agrees with this package, its own sections, the memory layout and the headers of the other ranks."""

from __future__ import annotations

import ctypes
import itertools

from distmk import abi
from distmk.abi import ProgramHeader
from distmk.check.findings import Findings
from distmk.program.layout import HEADER_FIELDS
from distmk.program.program import SECTIONS, Program, RankProgram
from distmk.tasks.abi_header import abi_hash
from distmk.tasks.own_types import find_types

SAME_ON_ALL_RANKS = ("num_ranks", "num_workers", "num_schedulers", *HEADER_FIELDS)
MAX_EVENTS = 2**24


def check_headers(program: Program, findings: Findings) -> None:
    """Check the header of every rank; all other checks rely on sound headers."""
    if not program.ranks:
        findings.add("header", "the program has no ranks")
        return
    first = program.ranks[0].header
    own_types = program.ranks[0].own_types
    expected_hash = abi_hash(find_types(own_types))
    for rank, part in enumerate(program.ranks):
        header = part.header
        if header.magic != abi.MAGIC or header.abi_hash != expected_hash:
            findings.add("header", f"rank {rank} has another magic or ABI hash than this package")
        if part.own_types != own_types:
            text = f"is for a runtime with types {list(part.own_types)}, rank 0 for one with {list(own_types)}"
            findings.add("header", f"rank {rank} {text}")
        if header.rank != rank or header.num_ranks != program.num_ranks:
            text = f"rank {rank} of {program.num_ranks} says it is rank {header.rank} of {header.num_ranks}"
            findings.add("header", text)
        for field in SAME_ON_ALL_RANKS:
            here, there = getattr(header, field), getattr(first, field)
            if here != there:
                findings.add("header", f"rank {rank} has {field} {here}, rank 0 has {there}")
        _check_sizes(rank, part, findings)
    hosts = [part.header.host for part in program.ranks]
    if hosts[0] or any(host - before not in (0, 1) for before, host in itertools.pairwise(hosts)):
        findings.add("header", f"the ranks are on hosts {hosts}; expected 0 first, and consecutive ranks for each host")
    _check_layout(program, findings)


def _check_sizes(rank: int, part: RankProgram, findings: Findings) -> None:
    """Check the numbers of schedulers, ring entries and events, and the offsets and sizes of the sections."""
    header = part.header
    if not 1 <= header.num_schedulers <= header.num_workers:
        text = f"rank {rank} has {header.num_schedulers} schedulers for {header.num_workers} workers"
        findings.add("header", text)
    if header.jit_capacity < 1 or header.jit_capacity & (header.jit_capacity - 1):
        findings.add("header", f"rank {rank}: a ring of {header.jit_capacity} entries is not a power of two")
    if header.num_events > MAX_EVENTS:
        findings.add("header", f"rank {rank} has {header.num_events} events")
    offset = ctypes.sizeof(ProgramHeader)
    for name, _, count_field in SECTIONS:
        section, count = getattr(part, name), getattr(header, count_field)
        if len(section) != count:
            findings.add("section", f"rank {rank} has {len(section)} {name}, its header says {count}")
        if getattr(header, f"{name}_offset") != offset:
            text = f"rank {rank}: {name} begin at {offset}, its header says {getattr(header, f'{name}_offset')}"
            findings.add("section", text)
        offset += ctypes.sizeof(section)
    if header.program_bytes != offset:
        findings.add("section", f"rank {rank}: the program has {offset} bytes, its header says {header.program_bytes}")


def _check_layout(program: Program, findings: Findings) -> None:
    """The headers repeat the memory layout."""
    layout, first = program.placement, program.ranks[0].header
    for field in HEADER_FIELDS:
        if getattr(layout, field) != getattr(first, field):
            text = f"the memory layout has {field} {getattr(layout, field)}, rank 0 has {getattr(first, field)}"
            findings.add("header", text)
    ours = [part.header.local_bytes for part in program.ranks]
    if list(layout.local_bytes) != ours:
        findings.add("header", f"the memory layout has local_bytes {list(layout.local_bytes)}, the ranks have {ours}")
