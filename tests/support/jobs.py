"""What every job of these tests ends with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from distmk.errors import DistmkError


def run(main: Callable[[], None]) -> NoReturn:
    """Exit as the command line would: an error of distmk's is one line and its own status."""
    try:
        main()
    except DistmkError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)
