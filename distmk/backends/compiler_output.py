"""The line of a compiler's output that a user should see."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from distmk.backends.cache_files import tells_of_no_space

# The kinds of lines, the most telling first: a full disk, a missing symbol, an error with its place, any error.
_TELLING = (
    tells_of_no_space,
    re.compile("[Uu]ndefined reference").search,
    re.compile(r"(: (fatal )?error\b|\): error:)").search,
    re.compile("error|fatal").search,
    bool,
)


def first_error(output: str, own_files: Sequence[Path] = ()) -> str:
    """The line that says what went wrong. If it names none of the user's files, the first line that names one follows."""
    lines = [line.strip() for line in output.splitlines()]
    message = next((errors[0] for says in _TELLING if (errors := [line for line in lines if says(line)])), "no output")
    names_file = [line for line in lines if any(str(path) in line for path in own_files)]
    return message if message in names_file or not names_file else f"{message} ({names_file[0]})"
