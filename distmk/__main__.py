"""`python -m distmk` is the `distmk` command."""

import sys

from distmk.cli import main

if __name__ == "__main__":
    sys.exit(main())
