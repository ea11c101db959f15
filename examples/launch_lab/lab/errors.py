"""The lab's own error; user mistakes raise `distmk.errors.UsageError`."""

from __future__ import annotations

from distmk.errors import DistmkError


class LabError(DistmkError):
    """A rung with a wrong result, or a call that the CUDA driver refused."""
