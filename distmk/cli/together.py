"""Mistakes that a rank sees before it has met the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from distmk.bootstrap import agree, connect, detect
from distmk.errors import DistmkError, UsageError


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """Let every rank of a launcher know of a UsageError raised inside: of a rank that just left, the launcher would
    end the others, rank 0 among them, before it could tell why."""
    try:
        yield
    except UsageError as error:
        refusal = error

        def refuse() -> None:
            raise refusal

        with contextlib.suppress(DistmkError):
            if detect() not in ("single", "local"):
                with connect() as bootstrap:
                    agree(bootstrap, refuse)
        raise


def launcher_rank() -> int:
    """This process' rank as its launcher says, 0 without one; known before, and without, a connection."""
    for name in ("DISTMK_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0
