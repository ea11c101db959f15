#!/usr/bin/env python3
"""Write the measurements of `distmk lab --out DIR` into examples/launch_lab/README.md.

python scripts/lab_page.py DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "launch_lab")]

from distmk.cli.exit_status import run_main  # noqa: E402
from lab.page import write  # noqa: E402
from lab.results import LabReport  # noqa: E402

PAGE = ROOT / "examples" / "launch_lab" / "README.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="with lab.json and the plots")
    parser.add_argument(
        "--page", type=Path, default=PAGE, metavar="FILE", help="default: the one of examples/launch_lab"
    )
    arguments = parser.parse_args()
    write(LabReport.load(arguments.folder), arguments.folder, arguments.page)
    return 0


if __name__ == "__main__":
    run_main(main)
