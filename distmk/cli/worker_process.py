"""`python -m distmk.cli.worker_process`: a rank that rank 0 started (`--ranks N` or `LLM(tensor_parallel_size=N)`)."""

from __future__ import annotations

import sys

from distmk.bootstrap import Bootstrap, connect, setup_follower
from distmk.console import discard_unwritten, occupy_closed_descriptors, tell
from distmk.engine.commands import serve
from distmk.errors import DistmkError, JobClosedError, OwnUsageError, RankLostError, one_line


def main() -> int:
    """Serve until rank 0 closes, and return the exit status.

    Rank 0 prints errors that all ranks share, and which rank is lost.
    """
    occupy_closed_descriptors()
    setup_follower()
    try:
        with connect() as bootstrap:
            _serve(bootstrap)
    except JobClosedError as error:
        return error.exit_code
    except RankLostError as error:  # rank 0 is lost, or another rank was before this one had joined
        tell(str(error), "error")
        return error.exit_code
    except OwnUsageError as error:  # the mistake keeps this rank from joining
        tell(one_line(error), "error")
        return error.exit_code
    except DistmkError as error:
        return error.exit_code
    finally:
        discard_unwritten()
    return 0


def _serve(bootstrap: Bootstrap) -> None:
    """Serve until rank 0 closes. JobClosedError: rank 0 ends the job earlier, because another rank is lost."""
    try:
        serve(bootstrap)
    except RankLostError as error:
        if 0 in bootstrap.lost_ranks():
            raise
        raise JobClosedError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
