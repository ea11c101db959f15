"""The prompts of `distmk generate`: text, @FILE, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from distmk.bootstrap import detect
from distmk.cli.together import launcher_rank
from distmk.errors import UsageError
from distmk.progress import progress
from distmk.user_files import read_whole

MAX_BYTES = 64 << 20  # more than the longest context has
NOTHING = "there is nothing to complete; give --prompt TEXT, --prompt @FILE, --prompt - (standard input) or --prompt-ids 1,2,3"


def read_prompts(given: Sequence[str], others: bool) -> list[str]:
    """The prompts of `--prompt`.

    If there are none, and neither `others` nor a launcher, the piped input is the prompt.

    `-` stands for standard input, `@FILE` for a file's text, `@@text` for the text `@text`. One line break at the end
    of a source is not part of the prompt. Only rank 0 reads, because only its prompts count. UsageError: a source
    cannot be read, or there is nothing.
    """
    if launcher_rank():
        return []
    if given or others:
        return [_read(text) for text in given]
    piped = detect() in ("single", "local") and sys.stdin is not None and not sys.stdin.isatty()
    text = _standard_input() if piped else ""
    if not text:
        raise UsageError(NOTHING)
    return [text]


def _read(text: str) -> str:
    if text == "-":
        return _standard_input()
    if text.startswith("@@"):
        return text[1:]
    return _file(text[1:]) if text.startswith("@") else text


def _standard_input() -> str:
    if detect() == "mpi":  # Open MPI 5 does not pass on the end of input, and rank 0 would wait forever
        raise UsageError("under mpirun standard input may never end; give --prompt @FILE")
    if sys.stdin is None:
        raise UsageError("standard input is closed; give --prompt TEXT")
    try:
        with progress("reading the prompt from standard input (Ctrl-D ends it)", bar=False):
            return _text(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input")
    except OSError as error:
        raise UsageError(f"standard input cannot be read ({error.strerror}); give --prompt TEXT") from None


def _file(path: str) -> str:
    try:
        return _text(read_whole(Path(path), MAX_BYTES, UsageError, "give less text"), f"--prompt @{path}")
    except UsageError as error:
        raise UsageError(f"{error}; for a prompt that begins with @, write @@") from None


def _text(content: bytes, source: str) -> str:
    if len(content) > MAX_BYTES:
        raise UsageError(f"{source}: more than {MAX_BYTES >> 20} MiB are no prompt; give less text")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 at byte {error.start}; convert it") from None
    return text.removesuffix("\n").removesuffix("\r")
