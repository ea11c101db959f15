"""The one source of every layout that Python shares with csrc.

`scripts/gen_abi.py` writes `csrc/abi.h` from the structs and enums here and from the argument structs that task types
register (distmk/tasks). All fields are naturally aligned little-endian; `ABI_HASH` is compared at launch.

An *operand* is 64 bits: an address space in the top byte and a byte offset below it, so that one program serves every
rank and both backends.
"""

from __future__ import annotations

import ctypes

from distmk.abi.batch import Batch, BatcherState, BatchRow, BatchRun, Candidate, Request, Sequence, TokenEvent
from distmk.abi.launch import Control, Fault, LaunchParams, TraceEntry, WaitRecordABI
from distmk.abi.program import JitEntry, JitRing, ProgramHeader, Queue, TaskDesc, Trigger, Wait
from distmk.abi.values import (
    BLOCK_TILES,
    CONSTANTS,
    ENUMS,
    EVENT_STRIDE_BYTES,
    LISTED,
    LONE_HEADER,
    MAGIC,
    MAX_LONE_COLS,
    MAX_OWN_SCHEDULERS,
    MAX_RANKS,
    MAX_ROWS,
    MERGE_SLICE,
    NO_EVENT,
    PART_FLOATS,
    PART_HEADER,
    ROUND_GROUPS,
    SHARE_AT_ONCE,
    SPACE_SHIFT,
    SPLITS_AT_ONCE,
    TASK_ARGS_BYTES,
    TILE_K,
    TILE_ROWS,
    Abort,
    Epilogue,
    FinishReason,
    LaunchKind,
    Space,
    operand,
    split_operand,
)

__all__ = [
    "BLOCK_TILES",
    "CONSTANTS",
    "ENUMS",
    "EVENT_STRIDE_BYTES",
    "LISTED",
    "LONE_HEADER",
    "MAGIC",
    "MAX_LONE_COLS",
    "MAX_OWN_SCHEDULERS",
    "MAX_RANKS",
    "MAX_ROWS",
    "MERGE_SLICE",
    "NO_EVENT",
    "PART_FLOATS",
    "PART_HEADER",
    "ROUND_GROUPS",
    "SHARE_AT_ONCE",
    "SPACE_SHIFT",
    "SPLITS_AT_ONCE",
    "STRUCTS",
    "TASK_ARGS_BYTES",
    "TILE_K",
    "TILE_ROWS",
    "Abort",
    "Batch",
    "BatchRow",
    "BatchRun",
    "BatcherState",
    "Candidate",
    "Control",
    "Epilogue",
    "Fault",
    "FinishReason",
    "JitEntry",
    "JitRing",
    "LaunchKind",
    "LaunchParams",
    "ProgramHeader",
    "Queue",
    "Request",
    "Sequence",
    "Space",
    "TaskDesc",
    "TokenEvent",
    "TraceEntry",
    "Trigger",
    "Wait",
    "WaitRecordABI",
    "operand",
    "split_operand",
]

STRUCTS: tuple[type[ctypes.Structure], ...] = (
    Wait,
    Trigger,
    TaskDesc,
    Queue,
    JitEntry,
    JitRing,
    BatchRow,
    BatchRun,
    Batch,
    Candidate,
    Request,
    TokenEvent,
    Sequence,
    BatcherState,
    WaitRecordABI,
    Fault,
    TraceEntry,
    Control,
    ProgramHeader,
    LaunchParams,
)
