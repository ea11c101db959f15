"""The end of a job: a script that a test runs on several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from distmk.errors import DistmkError


def run(main: Callable[[], None]) -> NoReturn:
    """Run `main` and exit as the command line does: an error of distmk is one line and an exit status of its own."""
    try:
        main()
    except DistmkError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)
