"""The table of a worker's shared memory (csrc/device/core/overlays.cuh): csrc/README.md shows it, and all uses go through it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from support.helpers import ROOT

from distmk.backends.host.build import build_sources, emulator_flags

DEVICE = ROOT / "csrc" / "device"
HEADER = DEVICE / "core" / "overlays.cuh"
REGIONS = r"(?:\.|->|::)\s*(stages|work|scratch)\b"


def expected_table() -> list[str]:
    """The rows that csrc/README.md must have. Sizes are the compiler's; the comment before an overlay says what it holds."""
    source = Path(__file__).with_name("print_overlays.cpp")
    tool = build_sources("overlays", "", [*emulator_flags(), "-w"], [source], DEVICE.rglob("*.cuh"))
    printed = subprocess.run([tool], capture_output=True, text=True, check=True, timeout=20).stdout
    held = {name: text for text, name in re.findall(r"/\* (.+?) \*/ +\\\n  X\((\w+),", HEADER.read_text())}
    rows = []
    for line in printed.splitlines():
        name, first, size, phases = line.split("\t")
        end = int(first) + int(size)
        rows.append(f"| {int(first):,} to {end:,} | {phases.replace(' | ', ', ')} | `{name}` | {held[name]} |")
    return rows


def test_readme_shows_the_table() -> None:
    expected = expected_table()
    text = (ROOT / "csrc" / "README.md").read_text()
    shown = text.partition("| bytes | phases | overlay | holds |\n| --- | --- | --- | --- |\n")[2].partition("\n\n")[0]
    assert shown.splitlines() == expected, "\n".join(expected)


def test_regions_are_used_through_the_table() -> None:
    """Only the file with the layout of the regions names them; no other file of the kernel does."""
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in DEVICE.rglob("*.cuh")
        if path.name != "shared.cuh"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(REGIONS, line.partition("//")[0])
    ]
    assert not wrong, "\n".join(wrong)
