"""Documents: links and paths lead to files, commands parse, every variable is listed, and README stays short."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.helpers import ROOT, Runner

from distmk.cli import build_parser

DEBUGGING = ROOT / "csrc" / "DEBUGGING.md"
SUFFIXES = r"(?:py|h|cpp|cuh|cu|sh|md|json|png|toml|sbatch)"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Outputs of commands, and files that the reader makes or that an example shows.
MADE = {
    "NN_name.py",
    "compile_commands.json",
    "trace.json",
    "axpy.py",
    "axpy.cpp",
    "lab.json",
    "tokenizer.json",
    "generation_config.json",
}


@cache
def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not in a checkout")
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def pages() -> list[Path]:
    return [ROOT / name for name in tracked() if name.endswith(".md")]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links() -> None:
    wrong = []
    for page in pages():
        for link in LINK.findall(FENCE.sub("", page.read_text())):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if re.match(r"https?:", link):
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_paths() -> None:
    """A file that a page names is the end of some file's path: `runtime/splits.h` in csrc's pages."""
    files = [f"/{name}" for name in tracked()]
    wrong = []
    for page in pages():
        quoted = re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))
        commands = [block for language, block in FENCE.findall(page.read_text()) if language == "bash"]
        for name in re.findall(
            rf"(?<![\w./$-])(?:[\w-]+/)*[\w-]+\.{SUFFIXES}\b(?!\w)", "\n".join([*quoted, *commands])
        ):
            if Path(name).name not in MADE and not any(file.endswith(f"/{name}") for file in files):
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def distmk_commands() -> Iterator[tuple[str, list[str]]]:
    """Arguments of `distmk` in the shell blocks and the quoted commands of all pages, a pipe's part by itself."""
    for page in pages():
        text = page.read_text()
        blocks = [block for language, block in FENCE.findall(text) if language == "bash"]
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += [line for line in re.findall(r"`(distmk [^`\n]+)`", FENCE.sub("", text)) if " --" in line]
        for line in lines:
            for part in re.sub(r"(^|\s)#.*", "", line).split(" | "):
                words = ["1" if word in ("N", "M") else word for word in shlex.split(part)]
                if "distmk" in words:
                    yield page.name, words[words.index("distmk") + 1 :]


def test_commands() -> None:
    commands = list(distmk_commands())
    assert len(commands) > 15
    for page, words in commands:
        if words[:1] != ["lab"]:  # its options are read by its own package
            _, unknown = build_parser().parse_known_args(words)
            assert not unknown, f"{page}: distmk {shlex.join(words)}"


def test_every_variable_is_listed() -> None:
    """launch/README.md has the environment variables that the package and the scripts read."""
    read = set()
    for name in tracked():
        if re.fullmatch(r"(distmk/.*\.py|launch/.*|scripts/[^/]*\.sh)", name) and not name.endswith((".md", ".png")):
            text = (ROOT / name).read_text()
            read |= set(
                re.findall(r"(?:environ\S*|getenv|env\.get|_(?:integer|seconds|folder|integers))\W+(DISTMK_\w+)", text)
            )
            read |= set(re.findall(r"\$\{?(DISTMK_\w+)", text))
            read |= set(re.findall(r'^_?\w*ENV\w* = "(DISTMK_\w+)"', text, re.MULTILINE))
    listed = set(re.findall(r"`(DISTMK_\w+)", (ROOT / "launch" / "README.md").read_text()))
    assert "DISTMK_LOG" in read and read <= listed, f"not listed: {sorted(read - listed)}"


def test_experiments() -> None:
    """One row an experiment: six filled cells, an id of its own, a date, and references to rows that exist."""
    text = (ROOT / "csrc" / "EXPERIMENTS.md").read_text().partition("\n## Experiments\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert lines[0] == "| id | date | hardware | idea | effect | kept |" and len(rows) > 200
    ids = [row[0] for row in rows]
    assert len(set(ids)) == len(ids)
    for row in rows:
        assert len(row) == 6 and all(cell.strip() for cell in row), row
        assert re.fullmatch(r"(by )?20\d\d-\d\d-\d\d", row[1]), row
        mentioned = set(re.findall(rf"\b[{''.join({name[0] for name in ids})}]\d{{1,2}}\b", " | ".join(row[3:])))
        assert mentioned <= set(ids), row


def test_hang_of_the_debugging_page(runner: Runner) -> None:
    """The command under "A hang", with the line and the status that the page shows."""
    section = DEBUGGING.read_text().partition("\n## 3. A hang\n")[2].partition("\n## ")[0]
    (_, command), line = FENCE.findall(section)[0], re.search(r"`(rank 1 .*)`", section)
    assert line
    python = f"PATH={Path(sys.executable).parent}:$PATH"
    done = runner.run(["bash", "-c", f"cd {ROOT} && {python} {command}"])
    assert (done.status, done.own_lines) == (5, [f"distmk: no progress for 2 s: {line[1]}"]), done


@pytest.mark.slow
def test_race_script_of_the_debugging_page(runner: Runner) -> None:
    (script,) = (block for language, block in FENCE.findall(DEBUGGING.read_text()) if language == "python")
    done = runner.run(["bash", "-c", f"cd {ROOT / 'tests'} && exec {sys.executable} -c {shlex.quote(script)}"])
    assert done.status == 0 and "rank 0: 30 iterations, abort 0" in done.stdout, done


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 140
    first = text.partition("\n## ")[2].partition("\n## ")[0]
    assert "distmk serve" in first and "curl " in first, "how to serve a model comes first"
