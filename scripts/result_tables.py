#!/usr/bin/env python3
"""Write the tables of README.md and csrc/PERFORMANCE.md from the result files in scripts/benchmark/results.

    python scripts/result_tables.py            # after a result file or a marker has changed
    python scripts/result_tables.py --check    # status 1 if a page shows other numbers than the files

A page has a pair of markers around each table, `<!-- result:NAME -->` and `<!-- /result -->`, and NAME.json has the numbers with
version, date, hardware, model and command. A cell is a number, which is shown with the digits of the file, a text, or null.
`versus`: rows are pairs of distmk and that peer, and a third row has the ratios of their times. `beside`: a column, whose times
are the base of the ratios behind the times of peers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "benchmark" / "results"
PAGES = (ROOT / "README.md", ROOT / "csrc" / "PERFORMANCE.md")
MARKED = re.compile(r"(<!-- result:(\w+) -->\n).*?(<!-- /result -->)", re.DOTALL)
REQUIRED = ("version", "commit", "date", "hardware", "model", "command", "columns", "rows")

Row = list[Any]


def load(path: Path) -> dict[str, Any]:
    """A result file, its numbers as they are written there. ValueError: a field is absent, or a row has other columns."""
    result: dict[str, Any] = json.loads(path.read_text(), parse_float=str, parse_int=str)
    absent = [name for name in REQUIRED if name not in result]
    if absent:
        raise ValueError(f"{path.name} lacks {', '.join(absent)}")
    for row in result["rows"]:
        if len(row) != len(result["columns"]):
            raise ValueError(
                f"{path.name}: the row {row[0]!r} has {len(row)} cells for {len(result['columns'])} columns"
            )
    return result


def table(result: dict[str, Any]) -> str:
    """The Markdown of a result, with a line that says where the numbers come from."""
    rows = result["rows"]
    if "versus" in result:
        rows = _with_ratio_rows(rows)
    if "beside" in result:
        base = result["columns"].index(result["beside"])
        rows = [_with_ratios(row, base) for row in rows]
    lines = [result["columns"], ["---"] * len(result["columns"]), *rows]
    source = f"{result['model']}; distmk {result['version']}; hardware: {result['hardware']}; {result['date']}"
    text = "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)
    return f"{text}\n\n*{source}:* `{result['command']}`\n"


def _with_ratio_rows(rows: list[Row]) -> list[Row]:
    """Each pair of rows, distmk's and the peer's, followed by the peer's times over distmk's; bold where distmk is slower."""
    made: list[Row] = []
    for ours, peer in zip(rows[::2], rows[1::2], strict=True):
        ratios = [_ratio(theirs, own) for own, theirs in zip(ours[2:], peer[2:], strict=True)]
        bold = [text and (f"**{text}**" if float(text) < 1 else text) for text in ratios]
        made += [ours, [None, *peer[1:]], [None, "ratio", *bold]]
    return made


def _with_ratios(row: Row, base: int) -> Row:
    """A row whose peers' times, behind the column `base`, are followed by their ratio to the time there."""
    ratios = [_ratio(cell, row[base]) for cell in row]
    return [
        f"{cell} ({ratio} x)" if number > base and ratio else cell
        for number, (cell, ratio) in enumerate(zip(row, ratios, strict=True))
    ]


def _ratio(time: str | None, base: str | None) -> str | None:
    try:
        return f"{float(time or '') / float(base or ''):.2f}"
    except ValueError:  # one of them is no number
        return None


def rewritten(page: str, results: Path = RESULTS) -> str:
    """The text of a page with every marked table as its file has it. FileNotFoundError: there is no such file."""
    return MARKED.sub(lambda found: f"{found[1]}{table(load(results / f'{found[2]}.json'))}{found[3]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page differs from its files")
    arguments = parser.parse_args()
    stale = [page for page in PAGES if rewritten(page.read_text()) != page.read_text()]
    for page in stale:
        if arguments.check:
            print(f"{page.relative_to(ROOT)} differs from scripts/benchmark/results", file=sys.stderr)
        else:
            page.write_text(rewritten(page.read_text()))
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
