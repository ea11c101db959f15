"""What each backend needs, what of it this machine has or lacks, and what to do about it. Changes nothing except the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from distmk.doctor import gpus, host, network, tools
from distmk.doctor.finding import Finding, first_line
from distmk.errors import UsageError

__all__ = ["Finding", "examine", "excused", "is_fit"]


def examine() -> Iterator[Finding]:
    """Yields the finding of each check as soon as it is made."""
    for name, check in (host.CHECKS | network.CHECKS).items():
        yield _safely(name, check)
    visible_gpus: list[gpus.Gpu] = []
    why_none = "no GPU here"
    try:
        visible_gpus = gpus.read_gpus()
    except UsageError as error:
        why_none = str(error)
    yield _safely("gpus", partial(gpus.check_gpus, visible_gpus, why_none), "cuda")
    for name, of_gpus in gpus.CHECKS.items():
        yield _safely(name, partial(of_gpus, visible_gpus), "cuda")
    for name, check in tools.CHECKS.items():
        yield _safely(name, check)
    yield _safely("kernel", partial(tools.check_kernel, sorted({gpu.capability for gpu in visible_gpus})), "cuda")


def is_fit(findings: Sequence[Finding], backend: str) -> bool:
    """Whether `backend` (host or cuda) can run: nothing that it needs is missing."""
    return not any(finding.state == "missing" and finding.backend == backend for finding in findings)


def excused(finding: Finding) -> Finding:
    """On a machine without a GPU, a finding that only the cuda backend lacks something becomes "unneeded"."""
    if finding.state != "missing" or finding.backend == "host":
        return finding
    return replace(finding, state="unneeded", text=f"not needed here: {finding.text}")


def _safely(name: str, check: Callable[[], Finding], backend: Literal["cuda"] | None = None) -> Finding:
    """The finding of `check`. If it raises, a finding that says so, and that `backend`, if given, cannot run."""
    try:
        return check()
    except Exception as error:
        text = f"cannot be found out ({type(error).__name__}: {first_line(str(error))})"
        return Finding(name, "missing" if backend else "warn", text, backend)
