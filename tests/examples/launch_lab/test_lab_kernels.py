"""The rungs' kernels compile for the oldest and for our own architecture, without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from distmk.backends.cuda.toolchain import find_nvcc
from distmk.errors import BuildError, UsageError
from lab.kernels import RUNGS, SOURCES, architecture_for, build


@pytest.mark.whole
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles(source: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        find_nvcc()
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("DISTMK_CACHE", str(tmp_path))
    cubin = build(source, architecture)
    assert build(source, architecture) == cubin and cubin.parent == tmp_path
    read = subprocess.run(["readelf", "-hsW", str(cubin)], capture_output=True, text=True, check=True).stdout
    flags = re.search(r"Flags: +0x([0-9a-f]+)", read)
    assert flags and int(flags[1], 16) >> 8 & 0xFF == int(re.sub(r"\D", "", architecture))
    declared = re.findall(r"__global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(", (RUNGS / source).read_text())
    assert declared, "the source has kernels"
    for name in declared:
        assert re.search(rf"FUNC +GLOBAL .* {name}$", read, re.MULTILINE), name


def test_all_sources_are_listed() -> None:
    assert set(SOURCES) == {path.name for path in RUNGS.glob("*.cu")}


def test_architectures() -> None:
    assert [architecture_for(each) for each in ((9, 0), (8, 0), (12, 0), (8, 9))] == [
        "sm_90a",
        "sm_80",
        "sm_120",
        "sm_89",
    ]
    with pytest.raises(UsageError, match=r"8\.0 or newer; this GPU has 7\.5"):
        architecture_for((7, 5))
