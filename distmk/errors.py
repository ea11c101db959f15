"""The errors that users meet. Each says what was wrong, what was expected, and what to do."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any


class DistmkError(Exception):
    """Base of all deliberate errors; the command prints it as one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(DistmkError):
    """An argument, an environment variable or a request that cannot be served."""

    exit_code = 2


class OwnUsageError(UsageError):
    """A mistake that this rank has met alone, so it reports it (or another rank of its host with the same mistake)."""


class ModelError(UsageError):
    """A checkpoint that is missing, damaged or not supported."""


class BuildError(UsageError):
    """The runtime could not be compiled or cached (no compiler, unwritable cache folder)."""


class OutputError(DistmkError):
    """Standard output cannot be written."""


class BrokenOutputError(OutputError):
    """The reader of standard output has left (`| head`). That is no mistake, so the command ends silently."""

    exit_code = 128 + 13  # the status that a shell shows for SIGPIPE


class RequestError(DistmkError):
    """A request that failed alone (finish reason error); the engine goes on."""


class CheckError(DistmkError):
    """A program that `check` could not prove correct; the text names tasks, events, buffers and ranks."""

    exit_code = 3


class RankLostError(DistmkError):
    """Another rank left or died while this one depended on it."""

    exit_code = 4


class JobClosedError(RankLostError):
    """Rank 0 ended the job while this rank still took part. Rank 0 reports the reason itself."""


class Interrupted(DistmkError):
    """The user stopped the run (Ctrl-C or SIGTERM) here or on another rank."""

    exit_code = 130


@dataclass(frozen=True)
class WaitRecord:
    """A wait when its deadline passed: its event's count `got` was still below `want`."""

    rank: int
    worker: int
    task: str
    event: str
    want: int
    got: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} worker {self.worker} task {self.task} waited for event {self.event}: "
            f"want {self.want}, got {self.got}"
        )


class HangError(DistmkError):
    """A wait passed its deadline of `deadline_s` seconds; `record` is the first stuck wait in program order."""

    exit_code = 5

    def __init__(self, record: WaitRecord, deadline_s: float) -> None:
        super().__init__(f"no progress for {deadline_s:g} s: {record}")
        self.record = record
        self.deadline_s = deadline_s

    def __reduce__(self) -> tuple[type[HangError], tuple[WaitRecord, float], dict[str, Any]]:
        # An exception is copied and unpickled by calling its type with `args`, which contains only the text.
        return type(self), (self.record, self.deadline_s), self.__dict__


def shown(value: object, max_chars: int = 60) -> str:
    """A wrong value as a message shows it: in Python's notation, on one line, with at most `max_chars` characters."""
    if isinstance(value, int) and abs(value) >= 1 << 128:  # Python refuses to write more than 4,300 digits
        return f"{'-' if value < 0 else ''}2**{abs(value).bit_length() - 1} or more"
    try:
        text = " ".join(repr(_beginning(value, [max_chars])).split())
    except ValueError:  # there is such a number inside
        text = f"a {type(value).__name__}"
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def _beginning(value: object, num_left: list[int]) -> object:
    """The beginning of `value`: at most `num_left` items, since each has at least one character in a text."""
    if isinstance(value, str | bytes):
        return value[:1000]
    if type(value) is list:
        return [_beginning(each, num_left) for each in value[: num_left[0]] if _counted(num_left)]
    if type(value) is dict:
        first = itertools.islice(value.items(), num_left[0])
        return {key: _beginning(each, num_left) for key, each in first if _counted(num_left)}
    return value


def _counted(num_left: list[int]) -> bool:
    num_left[0] -= 1
    return num_left[0] >= 0


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks, for a message of one line."""
    return " ".join(str(error).split())
