"""What takes long is shown on stderr: bars on a terminal, lines in a pipe, nothing on stdout or by other ranks than 0."""

from __future__ import annotations

import io
import os
import pty
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.chat_model import write_chat_model
from support.chat_templates import CHATML
from support.faults import write_config
from support.tiny_config import tiny_config

from distmk import LLM, SamplingParams, UsageError, check, progress
from distmk.cli import main
from distmk.console import tell
from distmk.progress import leave_to_rank_0


class FakeStream(io.StringIO):
    """Stands for stderr."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def frames(self) -> list[str]:
        """What each drawing of a line shows; the text ends where it is taken."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return [frame.strip() for frame in text.replace("\n", "\r").split("\r")]

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + 30
        while text not in self.getvalue():
            assert time.monotonic() < until, (text, self.getvalue())
            time.sleep(0.002)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process, rank 0, whose work is short."""
    monkeypatch.delenv("DISTMK_PROGRESS", raising=False)
    for name, value in {"QUIET_S": 0.05, "REPEAT_S": 0.15, "DELAY_S": 0.0, "FRAME_S": 0.005}.items():
        monkeypatch.setattr(progress, name, value)
    monkeypatch.setattr(progress, "_is_other_rank", False)


def test_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe, only what takes long speaks, at its start and its end, the innermost first, and on stderr."""
    monkeypatch.setattr("sys.stderr", stderr := FakeStream(is_terminal=False))
    with progress.progress("loading") as outer:
        outer.expect(8, "B")
        outer.add(2)
        with progress.progress("short"):
            pass
        with progress.progress("compiling", usually="1 to 3 minutes"):
            stderr.wait_for("distmk: compiling ... (usually 1 to 3 minutes)\n")
            time.sleep(0.4)  # longer than a repetition takes
        stderr.wait_for("distmk: loading ... 25 %, ")
    with suppress(UsageError), progress.progress("what fails"):
        stderr.wait_for("what fails ...\n")
        raise UsageError("says itself that it is over")
    with progress.progress("another stage of all ranks", shown=False):
        time.sleep(0.1)
    monkeypatch.setenv("DISTMK_PROGRESS", "0")
    with progress.progress("switched off"):
        time.sleep(0.1)
    lines = [re.sub("[0-9]+ s", "N s", line) for line in stderr.frames() if line]
    assert lines[:3] == [
        "distmk: compiling ... (usually 1 to 3 minutes)",
        "distmk: compiling: done in N s",
        "distmk: loading ...",
    ]
    assert lines[-2:] == ["distmk: loading: done in N s", "distmk: what fails ..."]
    assert set(lines[3:-2]) == {"distmk: loading ... 25 %, N s so far"} and capsys.readouterr().out == ""


def test_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One at a time, gone at the end; a line that is told meanwhile stays whole."""
    monkeypatch.setattr("sys.stderr", terminal := FakeStream(is_terminal=True))
    with progress.progress("loading the weights") as outer:
        outer.expect(4_000_000, "B")
        outer.add(1_000_000)
        terminal.wait_for("loading the weights:  25%|")
        with progress.progress("compiling", usually="1 to 3 minutes"):
            terminal.wait_for("distmk: compiling (0 s so far; usually 1 to 3 minutes)")
            tell("a warning")
        outer.add(1_000_000)
        terminal.wait_for("loading the weights:  50%|")
    frames = terminal.frames()
    assert any("1.00M/4.00M [" in frame and frame.endswith("B/s]") for frame in frames), frames
    assert "distmk: a warning" in frames and frames[-1] == ""
    assert not any("compiling" in frame and "loading" in frame for frame in frames)
    with progress.progress("reading what is typed", bar=False):
        terminal.wait_for("distmk: reading what is typed ...\n")
        time.sleep(0.2)
    assert terminal.frames() == ["distmk: reading what is typed ...", ""]
    leave_to_rank_0()
    with progress.progress("another rank"):
        time.sleep(0.1)
    assert terminal.frames() == [""] and capsys.readouterr().out == ""


@pytest.mark.parametrize("open_ends", [pty.openpty, os.pipe])
def test_bars_need_a_terminal(
    open_ends: Callable[[], tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The proof of both programs, a bar over their steps, which none of the answers on stdout gets into."""
    write_config(tiny_config(), tmp_path / "config.json")
    prove = check.check_lamport
    monkeypatch.setattr(check, "check_lamport", lambda *parts: (time.sleep(0.3), prove(*parts)))
    reader, writer = open_ends()
    with open(reader, "rb", buffering=0) as shown, open(writer, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        assert main(["check", "--model", str(tmp_path), "--ranks", "2", "--workers", "4"]) == 0
        tell("the end")
        text = b""
        while not text.endswith((b"the end\n", b"the end\r\n")):
            text += shown.read(1 << 16)
    answers = capsys.readouterr().out
    assert "verdict   correct" in answers and "proving" not in answers and "\r" not in answers
    on_terminal = open_ends is pty.openpty
    assert (b"distmk: proving the program:" in text and b"| 19/20 [" in text) == on_terminal, text
    assert (b"\r" in text) == on_terminal and b"%|" in text if on_terminal else b"\r" not in text


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_chat_model(tmp_path_factory.mktemp("chat") / "model", CHATML)
    with LLM(str(model), num_workers=1) as llm:
        yield llm


HI = [{"role": "user", "content": "Hi"}]
FEW = SamplingParams(max_tokens=4, ignore_eos=True)


class Bar:
    """A bar of somebody else's, which remembers what is done to it."""

    def __init__(self, **options: Any) -> None:
        self.options, self.log = options, list[int]()
        self.postfix = options["postfix"]

    def update(self, amount: int) -> None:
        self.log.append(amount)

    def close(self) -> None:
        self.log.append(-1)


def test_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`use_tqdm` of vLLM: on a terminal, not if it is False; what makes a bar of its own is called anywhere."""
    monkeypatch.setattr(progress, "_has_size", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal := FakeStream(is_terminal=True))
    for ask in (lambda **options: llm.generate(["a", "b"], FEW, **options), lambda **o: llm.chat([HI, HI], FEW, **o)):
        assert len(ask()) == 2
        last = terminal.frames()[-2]
        assert last.startswith("Processed prompts: 100%|") and "| 2/2 [" in last, last
        assert "est. speed input: " in last and " toks/s, output: " in last and "output: 0.00" not in last
        assert len(ask(use_tqdm=False)) == 2 and terminal.frames() == [""]
        made: list[Bar] = []

        def make(made: list[Bar] = made, **options: Any) -> Bar:
            made.append(Bar(**options))
            return made[-1]

        terminal.is_terminal = False
        assert len(ask()) == 2 and terminal.frames() == [""]
        assert len(ask(use_tqdm=make)) == 2
        assert made[0].log == [1, 1, -1] and made[0].options["total"] == 2 and made[0].options["dynamic_ncols"]
        terminal.is_terminal = True
    with pytest.raises(UsageError, match=r"use_tqdm is 'yes'; expected True, False, or what makes a bar"):
        llm.generate("a", FEW, use_tqdm="yes")  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
