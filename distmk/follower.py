"""`python -m distmk.follower`: a rank started by rank 0 (`--ranks N` or `LLM(tensor_parallel_size=N)`)."""

from __future__ import annotations

import sys

from distmk.bootstrap import connect, setup_follower
from distmk.errors import DistmkError, JobClosedError, RankLostError
from distmk.llm import serve
from distmk.output import tell


def main() -> int:
    """Serve until rank 0 closes; the exit status is that of the error that ended it. Rank 0 prints shared errors."""
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
