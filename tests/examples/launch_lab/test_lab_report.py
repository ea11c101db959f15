"""A report as lab.json, tables, plots and the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from lab_reports import COSTS, FEW, PURE_US, report
from support.helpers import ROOT

from distmk.errors import UsageError
from lab import page, plots, table
from lab.results import LabReport

PAGE = ROOT / "examples" / "launch_lab" / "README.md"
PNG = b"\x89PNG\r\n\x1a\n"


def test_saved_and_loaded(tmp_path: Path) -> None:
    of = report()
    of.save(tmp_path)
    assert LabReport.load(tmp_path) == of


def test_saved_and_loaded_without_most_rungs(tmp_path: Path) -> None:
    of = LabReport(machine={"gpu": None}, settings={}, left_out={"1": "no GPU"}, failed={"8": "wrong"})
    of.save(tmp_path)
    assert LabReport.load(tmp_path) == of


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file or directory; run distmk lab"),
        ("{", "is no JSON"),
        ("[]", "is not of this version"),
        ('{"format": 0}', "format 0, expected 1"),
        ('{"format": 1}', "is not of this version"),
    ],
)
def test_bad_files(tmp_path: Path, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "lab.json").write_text(content)
    with pytest.raises(UsageError, match=text):
        LabReport.load(tmp_path)


def test_table_has_every_rung_at_every_duration() -> None:
    made = table.chain_table(report())
    assert made.head == [
        "rung",
        "us a kernel, where it runs for",
        "2",
        "5",
        "20",
        "100",
        "adds to 5",
        "gap",
        "to prepare",
    ]
    rows = {row[0]: row for row in made.rows}
    assert list(rows) == ["1", "2", "3", "4", "5", "6", "7", "7f", "12"]
    for rung, (fixed, added) in COSTS.items():
        want = [table.number(pure + added + fixed / FEW) for pure in PURE_US.values()]
        assert rows[rung][2:6] == want
        assert float(rows[rung][6]) == pytest.approx(added + fixed / FEW, abs=0.1)
    lines = made.text().splitlines()
    assert len({line.rfind(rows[line.split()[0]][-1]) + len(rows[line.split()[0]][-1]) for line in lines[1:]}) == 1
    assert all(line.count("|") == len(made.head) + 1 for line in made.markdown().splitlines())


def test_published_run_is_beside_ours() -> None:
    made = table.published_table(report())
    assert made is not None
    cells = {row[1]: row[2:] for row in made.rows}
    assert cells["naive"] == ["52.9", "32.2"]  # at 20 us, the nearest to 47 on a logarithmic or any other scale
    assert cells["launch overhead"] == ["5.7", "12.2"]


def test_text_tells_what_did_not_run() -> None:
    of = report()
    of.left_out["5"], of.failed["10"] = "no libcudadevrt.a", "3 results are wrong"
    told = table.text(of)
    assert "left out: rung 5, device launch: no libcudadevrt.a" in told
    assert "FAILED: rung 10, drain and exit: 3 results are wrong" in told
    for line in ("1.56x as fast", "idle 90 W", "draining 60 us with 3 launches", "torch 20 us"):
        assert line in told, line


@pytest.mark.whole
def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = plots.draw(report(), tmp_path)
    assert sorted(path.name for path in made) == ["balance.png", "chain.png", "latency.png"]
    for path in made:
        assert path.read_bytes().startswith(PNG) and path.stat().st_size > 10_000, path
    host = dataclasses.replace(report(), machine={**report().machine, "gpu": None}, resident=None)
    assert [path.name for path in plots.draw(host, tmp_path)] == ["balance.png"]
    with pytest.raises(UsageError, match="cannot be written"):
        plots.draw(report(), tmp_path / "nowhere")


def test_the_page_has_a_place_for_everything(tmp_path: Path) -> None:
    """Every part has a marker; filling the page twice changes nothing; parts without a measurement say so."""
    found = page.parts(report())
    text = page.filled(PAGE.read_text(), found)
    assert page.filled(text, found) == text
    for part in found.values():
        assert part in text
    assert page.NOT_MEASURED not in text
    emptied = page.filled(text, {})
    assert emptied.count(page.NOT_MEASURED) == len(found)
    without = dataclasses.replace(report(), gemm=None, left_out={"9": "no torch"})
    assert "Not measured: no torch." in page.filled(text, page.parts(without))
    with pytest.raises(UsageError, match="no marker for elsewhere"):
        page.filled(text, {"elsewhere": "1"})


def test_page_is_written_with_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured, written = tmp_path / "lab", tmp_path / "page" / "README.md"
    measured.mkdir()
    written.parent.mkdir()
    written.write_text(PAGE.read_text())
    plots.draw(report(), measured)
    page.write(report(), measured, written)
    assert "A GPU, 4 SMs, driver 1.2" in written.read_text()
    assert (written.parent / "chain.png").read_bytes() == (measured / "chain.png").read_bytes()
    with pytest.raises(UsageError, match="without a GPU"):
        page.write(dataclasses.replace(report(), machine={"gpu": None}), measured, written)


def test_json_has_hardware_driver_and_versions(tmp_path: Path) -> None:
    content = json.loads(report().save(tmp_path).read_text())
    assert {"gpu", "driver", "nvcc", "cpu"} <= set(content["machine"])
    assert {"median", "p25", "p75", "p99", "low", "high", "count"} == set(content["chain"][0]["kernel_us"])
