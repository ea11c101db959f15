"""The GPU kernels compile and link for every architecture, on a machine without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.helpers import DISTMK, Runner

from distmk.backends.cuda.build import ARCHITECTURES, Report
from distmk.backends.cuda.probe import KERNEL, build_probe
from distmk.backends.cuda.toolchain import find_toolchain
from distmk.errors import BuildError

MAX_REGISTERS = 168  # per thread: the 12 warps of a block share an SM's registers
# Per thread, on sm_90a, which the kernel is tuned for: 1,200 bytes cost a tenth of its speed.
MAX_SPILL_BYTES = 200


def why_not() -> str | None:
    try:
        find_toolchain()
    except BuildError as error:
        return str(error)
    return None


def built(name: str, folder: Path) -> Path:
    """The kernel for an architecture."""
    if reason := why_not():
        pytest.skip(reason)
    runner = Runner(folder, timeout_s=600)
    finished = runner.run([*DISTMK, "build", "--arch", name, "--output", str(folder / "output")])
    assert finished.status == 0, finished.stderr
    return Path(finished.stdout.split()[1].rstrip(","))


def architecture_in(read: str) -> int:
    """The compute capability in readelf's report: 90 for 9.0."""
    assert "NVIDIA CUDA architecture" in read
    flags = re.search(r"Flags: +0x([0-9a-f]+)", read)
    assert flags
    return int(flags[1], 16) >> 8 & 0xFF


def calls_in(kernel: Path) -> set[tuple[str, str]]:
    """Pairs of caller and callee, from the pairs of symbol numbers that the linker leaves in .nv.callgraph."""
    read = subprocess.run(
        ["readelf", "-sW", "-x.nv.callgraph", str(kernel)], capture_output=True, text=True, check=True
    ).stdout
    names = {int(number): name for number, name in re.findall(r"^ +(\d+): .* (\S+)$", read, re.MULTILINE)}
    words = "".join(re.findall(r"^ +0x[0-9a-f]{8} ((?:[0-9a-f]{8} ){1,4})", read, re.MULTILINE)).split()
    symbols = [int.from_bytes(bytes.fromhex(word), "little") for word in words]
    pairs = zip(symbols[::2], symbols[1::2], strict=True)
    return {(names[caller], names[callee]) for caller, callee in pairs if caller in names and callee in names}


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "sm_90a")) for name in ARCHITECTURES]
)
def test_kernel_of_every_architecture(name: str, tmp_path: Path) -> None:
    """The machine code is for that architecture, lacks no symbol, and needs few enough registers to run."""
    kernel = built(name, tmp_path)
    read = subprocess.run(["readelf", "-hsW", str(kernel)], capture_output=True, text=True, check=True).stdout
    major, minor = ARCHITECTURES[name].capability
    assert architecture_in(read) == 10 * major + minor
    defined = set(re.findall(r"(?:FUNC|OBJECT) +GLOBAL .* (\w+)$", re.sub(r".* UND .*", "", read), re.MULTILINE))
    assert {"distmk_megakernel", "nvshmemi_device_state_d", "nvshmemi_device_lib_version_d"} <= defined
    missing = {symbol for symbol in re.findall(r"GLOBAL .* UND (\S+)", read) if not symbol.startswith(".nv.")}
    assert missing <= {"vprintf"}, "the driver defines no other symbols"
    # In a function that calls another, sm_90a's compiler waits for each product of warpgroups at once.
    if name == "sm_90a":
        mainloops = set(re.findall(r"\b(_Z\w*(?:run_jobs|run_attention_job)ILj\w*)$", read, re.MULTILINE))
        calls = calls_in(kernel)
        assert len(mainloops) > 4 and calls
        assert not [call for call in calls if call[0] in mainloops]
    report = Report.of(kernel)
    assert report and report.architecture == name
    assert 0 < report.registers <= MAX_REGISTERS
    assert name != "sm_90a" or report.spill_bytes <= MAX_SPILL_BYTES
    assert report.serialized_functions == 0


@pytest.mark.whole
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stream_probe_of_every_architecture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setenv("DISTMK_CACHE", str(tmp_path))
    probe = build_probe(name)
    assert build_probe(name) == probe and probe.parent == tmp_path
    read = subprocess.run(["readelf", "-hsW", str(probe)], capture_output=True, text=True, check=True).stdout
    major, minor = ARCHITECTURES[name].capability
    assert architecture_in(read) == 10 * major + minor
    assert KERNEL.decode() in read
