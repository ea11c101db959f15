"""Decisions and errors that all ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from distmk.bootstrap.base import Bootstrap, name_ranks
from distmk.bootstrap.messages import gather_json
from distmk.errors import DistmkError, Interrupted, RankLostError, UsageError

T = TypeVar("T")

_SHOWN_CHARS = 80
_REPORT = (None, {"type": str, "exit_code": int, "text": str})


def agree(bootstrap: Bootstrap, fn: Callable[[], T]) -> T:
    """Run `fn` on every rank and return this rank's result; if it fails on any rank, raise on every rank. Collective.

    A failing rank raises its own error. The other ranks raise an error with the type, exit code and text of the lowest
    failing rank, after "rank N: ". Exceptions other than DistmkError are bugs; they are reported as well, so that no
    rank waits for one that has left. Raises RankLostError if a rank is gone.
    """
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = fn()
    except BaseException as error:  # also KeyboardInterrupt: the other ranks must not wait for this one
        failure = error
    try:
        with contextlib.nullcontext() if failure is None else bootstrap.losing_stopped_ranks():
            reports = gather_json(bootstrap, _describe(failure), "report", _REPORT)
    except RankLostError:
        if failure is not None:
            raise failure from None
        raise
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            raise _rebuild(rank, report)
    return result  # type: ignore[return-value]


def agree_same(bootstrap: Bootstrap, what: str, fingerprints: Mapping[str, str]) -> None:
    """Raise UsageError on every rank unless all ranks give equal `fingerprints`. Collective.

    `what` is the message's word for all of them together ("options", "models"). The keys should be names that a user
    can change ("--model"). Raises RankLostError if a rank is gone.
    """
    tables: list[dict[str, str]] = gather_json(bootstrap, dict(fingerprints), "fingerprints", {str: str})
    names = list(dict.fromkeys(name for table in tables for name in table))
    differences = []
    differing = []
    for name in names:
        first = tables[0].get(name)
        others = [rank for rank, table in enumerate(tables) if table.get(name) != first]
        if others:
            differing.append(name)
            verb = "differs" if len(others) == 1 else "differ"
            shown = f"{_show(tables[others[0]].get(name))} on rank {others[0]}, {_show(first)} on rank 0"
            differences.append(f"{name}: {name_ranks(others)} {verb} from rank 0 ({shown})")
    if differences:
        raise UsageError(
            f"ranks were given different {what}: {'; '.join(differences)}; "
            f"start every rank with the same {', '.join(differing)}"
        )


def _show(value: str | None) -> str:
    if value is None:
        return "nothing"
    return repr(value if len(value) <= _SHOWN_CHARS else value[: _SHOWN_CHARS - 3] + "...")


def _describe(failure: BaseException | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    if isinstance(failure, DistmkError):
        kind, code, text = type(failure), failure.exit_code, str(failure)
    elif isinstance(failure, (KeyboardInterrupt, SystemExit)):
        kind, code, text = Interrupted, Interrupted.exit_code, f"stopped by {type(failure).__name__}"
    else:
        # One line; the failing rank prints the traceback.
        first_line = (str(failure).splitlines() or [""])[0]
        kind, code, text = DistmkError, DistmkError.exit_code, f"unexpected {type(failure).__name__}: {first_line}"
    return {"type": f"{kind.__module__}.{kind.__qualname__}", "exit_code": code, "text": text}


def _rebuild(rank: int, report: Mapping[str, Any]) -> DistmkError:
    kind = next((k for k in _error_types(DistmkError) if f"{k.__module__}.{k.__qualname__}" == report["type"]), None)
    # A type with its own constructor (HangError) has data that was not sent, so its base class takes its place.
    while kind is not None and kind.__init__ is not DistmkError.__init__:
        kind = kind.__base__
    error = (kind or DistmkError)(f"rank {rank}: {report['text']}")
    error.exit_code = int(report["exit_code"])
    return error


def _error_types(kind: type[DistmkError]) -> Iterator[type[DistmkError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _error_types(child)
