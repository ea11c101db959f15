"""Output that cannot be written, or that a terminal would obey."""

from __future__ import annotations

import ast
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from support.full_disk import disk_for
from support.helpers import DISTMK, ROOT, Runner

from distmk import console
from distmk.cli import build_command, main

FULL = "distmk: cannot write to standard output: No space left on device; redirect it to a file on a disk with room\n"
CLOSED = "distmk: standard output is closed; redirect it to a file, or to /dev/null to discard it\n"


def full() -> TextIO:
    return open("/dev/full", "w")


def without_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


@pytest.fixture(scope="module")
def trace_file(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    assert main([*generate(tiny_model), "--trace", str(path)]) == 0
    return path


def generate(model: Path) -> list[str]:
    return ["generate", "--model", str(model), "--prompt-ids", "1,2,3", "--max-new-tokens", "2"]


@pytest.mark.parametrize(
    ("sink", "status", "said"),
    [(full, 1, FULL), (lambda: None, 2, CLOSED), (without_reader, 141, "")],
    ids=["full", "closed", "broken_pipe"],
)
def test_stdout_that_cannot_be_written(
    sink: Callable[[], TextIO | None],
    status: int,
    said: str,
    tiny_model: Path,
    trace_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every command ends with one line, or silently where the reader has left."""
    small = ["--model", str(tiny_model), "--max-model-len", "16"]
    commands = [generate(tiny_model), [*generate(tiny_model), "--json"], ["check", *small], ["doctor"]]
    commands += [["trace", str(trace_file)], ["build", "--list"], ["--help"], ["--version"]]
    for command in commands:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", sink())
            assert main(command) == status, command
            if sys.stdout is not None:
                sys.stdout.close()  # as Python does at exit: nothing is left that fails
        assert capsys.readouterr().err == said, command


def test_streams_of_a_process(tiny_model: Path, runner: Runner) -> None:
    """Also the ranks that rank 0 started end; a stderr that is full or closed loses messages only."""
    expected = {
        ">/dev/full": (1, "", FULL),
        ">&-": (2, "", CLOSED),
        "2>/dev/full --workers 40": (0, "19 86 \n", ""),
        "<&- 2>&- --workers 40": (0, "19 86 \n", ""),
    }
    command = ["bash", *DISTMK, *generate(tiny_model), "--ranks", "2"]
    started = [runner.start(["bash", "-c", f'exec "$@" {redirection}', *command]) for redirection in expected]
    for process, (redirection, wanted) in zip(started, expected.items(), strict=True):
        finished = runner.finish(process)
        assert (finished.status, finished.stdout, finished.stderr) == wanted, redirection


def test_closed_descriptors_are_occupied() -> None:
    """A file that is opened later does not become the standard output of libraries and child processes."""
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        console.occupy_closed_descriptors()
        os._exit(0 if os.open("/dev/null", os.O_RDONLY) > 2 and os.get_inheritable(1) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("stream", [full, without_reader, lambda: None])
def test_message_that_cannot_be_written(
    stream: Callable[[], TextIO | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    assert main(["generate", "--model", "/nonexistent", "--prompt-ids", "1"]) == 2
    if sys.stderr is not None:
        sys.stderr.close()


def test_encoding_without_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, text in (
        ("ascii", r"na\xefve \u20ac \U0001f600 \udcff"),
        ("latin-1", r"naïve \u20ac \U0001f600 \udcff"),
    ):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        console.write_generated("naïve € \U0001f600 \udcff")
        assert written.getvalue().decode(encoding) == text


def test_kernel_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """build --output DIR names the file, and leaves none that is cut short."""
    made, folder = tmp_path / "cuda-sm_90a-1.cubin", tmp_path / "there"
    made.write_bytes(bytes(5000))
    monkeypatch.setattr(build_command, "build_cubin", lambda architecture, own_types, packed: made)
    with disk_for(512):
        assert main(["build", "--arch", "sm_90a", "--output", str(folder)]) == 2
    assert capsys.readouterr().err == f"distmk: cannot write {folder / made.name}: File too large\n"
    assert list(folder.iterdir()) == []


EVIL = "a\x1b]0;owned\x07\x9b2J\u202eb\u2066\r\tc\u2028é\n"
TAMED = r"a\x1b]0;owned\x07\x9b2J\u202eb\u2066\r" + "\tc\\u2028é\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Are escapes in everything that is printed, but for generated text that does not go to a terminal."""
    console.show(EVIL, end="")
    console.write_generated(EVIL)
    console.tell(EVIL[:-1])
    said = capsys.readouterr()
    assert (said.out, said.err) == (TAMED + EVIL, f"distmk: {TAMED}")
    monkeypatch.setattr(sys, "stdout", Terminal())
    console.write_generated(EVIL)
    assert sys.stdout.getvalue() == TAMED


def test_only_the_console_writes() -> None:
    """Every other module passes its text to `console`, which knows what a stream cannot take."""
    paths = [*(ROOT / "distmk").rglob("*.py"), ROOT / "examples" / "launch_lab" / "lab" / "command.py"]
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            streams = isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "__stdout__", "__stderr__")
            if prints or (streams and isinstance(node.value, ast.Name) and node.value.id == "sys"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {place.partition(":")[0] for place in found} <= {"distmk/console.py"}, found
