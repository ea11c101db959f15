"""What this machine has for each backend, and what to do about what it lacks. Looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from distmk.doctor import gpus, host, tools
from distmk.doctor.finding import Finding
from distmk.errors import UsageError

__all__ = ["Finding", "examine", "is_fit"]


def examine() -> Iterator[Finding]:
    """One finding a check, as they come."""
    for name, check in host.CHECKS.items():
        yield _safely(name, check)
    found: list[gpus.Gpu] = []
    why_none = "no GPU here"
    try:
        found = gpus.read_gpus()
    except UsageError as error:
        why_none = str(error)
    yield _safely("gpus", partial(gpus.check_gpus, found, why_none), "cuda")
    for name, of_gpus in gpus.CHECKS.items():
        yield _safely(name, partial(of_gpus, found), "cuda")
    for name, check in tools.CHECKS.items():
        yield _safely(name, check)
    yield _safely("kernel", partial(tools.check_kernel, sorted({gpu.capability for gpu in found})), "cuda")


def is_fit(findings: Sequence[Finding], backend: str) -> bool:
    """Whether nothing is missing that `backend` (host or cuda) needs."""
    return not any(finding.state == "missing" and finding.backend == backend for finding in findings)


def _safely(name: str, check: Callable[[], Finding], backend: Literal["cuda"] | None = None) -> Finding:
    """What cannot be found out is a finding too, and counts against the backend that needs it."""
    try:
        return check()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        text = f"cannot be found out ({type(error).__name__}: {first})"
        return Finding(name, "missing" if backend else "warn", text, backend)
