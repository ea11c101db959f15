"""A copy of the package with new files in it, as somebody would have it who adds a type or a format."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Mapping
from pathlib import Path

from support.helpers import ROOT


def copy_with(new_files: Mapping[str, str], folder: Path) -> None:
    """Copy what `scripts/gen_abi.py` reads and writes into `folder`, and add the new files, by their paths."""
    for part in ("distmk", "csrc"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "gen_abi.py", folder / "scripts")
    for name, text in new_files.items():
        (folder / name).write_text(text.lstrip())


def changed_files(folder: Path) -> list[str]:
    """Files of the copy that are new or differ from the repository's, sorted."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(
        file.as_posix()
        for file in files
        if "__pycache__" not in file.parts
        and not ((ROOT / file).exists() and filecmp.cmp(folder / file, ROOT / file, shallow=False))
    )
