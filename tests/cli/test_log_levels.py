"""DISTMK_LOG: which lines go to stderr, at each level."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from support.helpers import DISTMK, Runner

from distmk import env, progress
from distmk.cli import main
from distmk.cli.serve_command import add_to
from distmk.console import tell
from distmk.errors import UsageError

LINES = {"error": "it failed", "warning": "warning: that is odd", "info": "so it goes", "debug": "by the way"}


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("distmk: ") for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize("chosen", [*LINES, ""])
def test_ladder(chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A level has its own lines and those of all more urgent ones. A warning and an information need not name their level."""
    monkeypatch.setenv("DISTMK_LOG", chosen)
    for level, text in LINES.items():
        tell(text, level)
    tell("warning: that is odd")
    tell("so it goes")
    num = 1 + list(LINES).index(chosen or "info")
    expected = list(LINES.values())[:num] + ["warning: that is odd"] * (num > 1) + ["so it goes"] * (num > 2)
    assert told(capsys) == expected


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is information."""
    began: list[str] = []
    monkeypatch.setattr(progress, "_tell", lambda block, over: began.append(block.doing))
    monkeypatch.setattr(progress, "_is_other_rank", False)
    monkeypatch.setattr(progress, "on_terminal", lambda: False)
    monkeypatch.delenv("DISTMK_PROGRESS", raising=False)
    for level in env.LOG_LEVELS:
        monkeypatch.setenv("DISTMK_LOG", level)
        with progress.progress(level):
            pass
    assert began == ["info", "debug"]


def test_wrong_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, whatever the command; the line itself does not need the level."""
    monkeypatch.setenv("DISTMK_LOG", "loud")
    expected = "DISTMK_LOG='loud' is no level; unset it or give one of error, warning, info, debug"
    assert main(["doctor"]) == 2
    assert told(capsys) == [expected]
    with pytest.raises(UsageError, match="is no level"):
        tell("so it goes")


@pytest.mark.parametrize("level", [*env.LOG_LEVELS, ""])
def test_server_has_the_level(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTMK_LOG", level)
    parser = argparse.ArgumentParser()
    add_to(parser.add_subparsers())
    assert parser.parse_args(["serve", "MODEL"]).log_level == (level or "info")
    assert parser.parse_args(["serve", "MODEL", "--log-level", "critical"]).log_level == "critical"


def test_a_run(tiny_model: Path, runner: Runner) -> None:
    """The result is on stdout at every level. The summary is information, and what a developer asks for is debug."""
    command = [*DISTMK, "generate", "--model", str(tiny_model), "--prompt-ids", "1,2,3", "--max-tokens", "2"]
    quiet, full = (runner.run(command, {"DISTMK_LOG": level}) for level in ("error", "debug"))
    assert quiet.status == full.status == 0, (quiet, full)
    assert quiet.stdout == full.stdout and quiet.stderr == ""
    for text in ("distmk: rank 0 of 1 (no launcher)\n", " is taken from the cache\n", "loaded in"):
        assert text in full.stderr, full.stderr
