"""`python -m distmk.cli.worker_process`: a rank that rank 0 started (`--ranks N` or `LLM(tensor_parallel_size=N)`)."""

from __future__ import annotations

import sys

from distmk.bootstrap import connect, setup_follower
from distmk.console import discard_unwritten, occupy_closed_descriptors, tell
from distmk.errors import DistmkError, JobClosedError, RankLostError
from distmk.serving.commands import serve


def main() -> int:
    """Serve until rank 0 closes; returns the exit status. Rank 0 prints errors that all ranks share."""
    occupy_closed_descriptors()
    setup_follower()
    try:
        with connect() as bootstrap:
            serve(bootstrap)
    except JobClosedError as error:
        return error.exit_code
    except RankLostError as error:
        tell(str(error))
        return error.exit_code
    except DistmkError as error:
        return error.exit_code
    finally:
        discard_unwritten()
    return 0


if __name__ == "__main__":
    sys.exit(main())
