"""Mistakes that a rank finds before it is connected with the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from distmk.bootstrap import agree, connect, detect
from distmk.bootstrap.detect import check_size, read_launch
from distmk.errors import DistmkError, OwnUsageError, UsageError

_RANK_ENVS = ("DISTMK_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """Raise a UsageError of any rank on all ranks of a launcher.

    If one rank just left, the launcher would end the others before rank 0 could report the reason. OwnUsageError: the
    ranks do not come together, so this rank reports it.
    """
    try:
        yield
    except UsageError as error:
        if not _is_shared(error):
            raise OwnUsageError(str(error)) from None
        raise


def _is_shared(refusal: UsageError) -> bool:
    """Raise `refusal` on all ranks, once they have come together. Returns False if they have not."""

    def refuse() -> None:
        raise refusal

    try:
        if detect() in ("single", "local"):
            return True
        with connect() as bootstrap:
            try:
                agree(bootstrap, refuse)
            except UsageError:
                return bootstrap.loss is None
    except DistmkError:
        pass
    return False


def require_one_job(num_ranks: int | None) -> None:
    """UsageError: a launcher started several ranks, and each is asked for its own job. Their outputs would mix."""
    if num_ranks == 1:
        launch = read_launch(None, os.environ)
        check_size(num_ranks, launch.world_size, launch.launcher)


def launcher_rank() -> int:
    """This process' rank according to its environment; 0 without a launcher. Needs no connection."""
    try:
        return read_launch(None, os.environ).rank
    except UsageError:  # the variables contradict each other, which one rank should report
        ranks = [os.environ.get(name, "") for name in _RANK_ENVS]
    return next((int(text) for text in ranks if text.isascii() and text.isdigit() and len(text) < 10), 0)
