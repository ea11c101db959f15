"""`python -m distmk.testing CASE`: a rank that `compare_with_oracle` has started. Rank 0 reports for all ranks."""

from __future__ import annotations

import json
import sys

from distmk.bootstrap import connect
from distmk.errors import DistmkError
from distmk.testing.case import read_follower


def main() -> int:
    case, build = read_follower(sys.argv[1])
    try:
        with connect() as bootstrap:
            bootstrap.allgather(json.dumps(case.run(build, bootstrap)).encode())
    except DistmkError as error:
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
