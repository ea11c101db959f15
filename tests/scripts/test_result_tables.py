"""Tables of numbers in documents: they are what the result files give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import result_tables
from result_tables import MARKED, PAGES, RESULTS, load, rewritten, table

FILES = sorted(RESULTS.glob("*.json"))
FIELDS = {"version": "1", "commit": None, "date": "2026-01-02", "hardware": "a GPU", "model": "m", "command": "run it"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_show_the_files(page: Path) -> None:
    text = page.read_text()
    assert rewritten(text) == text, f"run {result_tables.__file__}"


def test_every_file_is_whole_and_shown() -> None:
    shown = {name for page in PAGES for _, name, _ in MARKED.findall(page.read_text())}
    assert shown == {path.stem for path in FILES}
    for path in FILES:
        result = load(path)
        assert all(result[name] for name in ("version", "date", "hardware", "model", "command")), path.name


def written(folder: Path, **fields: object) -> Path:
    path = folder / "some.json"
    path.write_text(json.dumps(FIELDS | fields))
    return path


def test_ratios(tmp_path: Path) -> None:
    columns = ["what", "engine", "one", "two", "three"]
    rows = [["step", "distmk", 2, 4.0, None], ["step", "peer", 3, 3.0, 1]]
    lines = table(load(written(tmp_path, columns=columns, rows=rows, versus="peer"))).splitlines()
    assert lines[2:5] == [
        "| step | distmk | 2 | 4.0 |  |",
        "|  | peer | 3 | 3.0 | 1 |",
        "|  | ratio | 1.50 | **0.75** |  |",
    ]
    assert lines[-1] == "*m; distmk 1; hardware: a GPU; 2026-01-02:* `run it`"
    rows = [["step", 2.0, 5.0, "2026-01-02"]]
    beside = written(tmp_path, columns=["what", "distmk", "peer", "date"], rows=rows, beside="distmk")
    assert table(load(beside)).splitlines()[2] == "| step | 2.0 | 5.0 (2.50 x) | 2026-01-02 |"


def test_a_file_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"some\.json lacks columns, rows"):
        load(written(tmp_path))
    with pytest.raises(ValueError, match="the row 'step' has 1 cells for 2 columns"):
        load(written(tmp_path, columns=["a", "b"], rows=[["step"]]))
