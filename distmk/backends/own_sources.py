"""The parts of registered task types (`distmk.tasks.own_types`) in a runtime: bodies, and a header that replaces csrc/abi.h."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distmk.errors import BuildError, UsageError
from distmk.graph.task import TASK_TYPES, Task
from distmk.program.program import RankProgram
from distmk.tasks.abi_header import render
from distmk.tasks.own_types import find_types

Platform = Literal["host", "device"]  # "host" is the host twin; "device" means GPUs and the emulator

BODIES_HEADER = "own_bodies.cuh"

# Words that compile in a device body but break the kernel.
FORBIDDEN = {
    "__shared__": "would move the kernel's shared memory; use shared().work of device/core/shared.cuh",
    "__syncthreads": "waits for warps that run no bodies; use context.team.sync()",
}


@dataclass(frozen=True)
class OwnSources:
    """The header and the files of the bodies. `key`: their contents without absolute paths, as ingredients of a cache key."""

    header: str
    bodies: tuple[Path, ...]
    key: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write abi.h, and a header that includes the bodies where they are, so that compiler messages name the user's
        files.
        """
        (folder / "abi.h").write_text(self.header)
        (folder / BODIES_HEADER).write_text("".join(f'#include "{path}"\n' for path in self.bodies))


def own_sources(names: Sequence[str], platform: Platform) -> OwnSources | None:
    """The parts that the registered types `names` add on a platform; None: there are no such types.

    BuildError: a body cannot be read, or contains a `FORBIDDEN` word.
    """
    if not names:
        return None
    own = find_types(names)
    absent = [cls for cls in own if _body(cls, platform) is None]
    bodies = tuple(dict.fromkeys(path for cls in own if (path := _body(cls, platform))))
    header, texts = render(own, absent), list(_texts(bodies))
    if platform == "device":
        for path, text in texts:
            _check_device_body(path, text)
    return OwnSources(header, bodies, (header, *(f"{path.name}\n{text}" for path, text in texts)))


def type_digests(names: Sequence[str]) -> dict[str, str]:
    """For each registered type, 12 hex digits of its arguments, traits and bodies.

    Ranks with the same type get the same digits.
    """
    digests = {}
    for cls in find_types(names):
        bodies = [path for path in (_body(cls, "host"), _body(cls, "device")) if path]
        parts = [render([cls]), *(text for _, text in _texts(bodies))]
        digests[cls.type_name] = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return digests


def require_bodies(programs: Sequence[RankProgram], platform: Platform, backend: str) -> None:
    """Raise UsageError if a task of the programs has no body for the backend."""
    absent = {cls.type_id: cls for cls in TASK_TYPES.values() if not _has_body(cls, platform)}
    for program in programs if absent else ():
        for desc, op in zip(program.tasks, program.task_names, strict=True):
            if cls := absent.get(desc.type):
                advice = f"register {cls.__name__} with {platform}=FILE, or " if cls.bodies else ""
                raise UsageError(
                    f"task {op} is of type {cls.type_name}, which has no {platform} body for the {backend} backend; "
                    f"{advice}choose another backend"
                )


def _check_device_body(path: Path, text: str) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        for word, why in FORBIDDEN.items():
            if word in line.partition("//")[0]:
                raise BuildError(f"{path}:{number}: {word} {why}")


def _has_body(cls: type[Task], platform: Platform) -> bool:
    if cls.bodies:
        return _body(cls, platform) is not None
    return cls.on_device if platform == "device" else not cls.takes_packed_weights


def _body(cls: type[Task], platform: Platform) -> Path | None:
    assert cls.bodies
    return cls.bodies.host if platform == "host" else cls.bodies.device


def _texts(bodies: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """The bodies and the files beside them that they include, each once."""
    todo, seen = list(bodies), set[Path]()
    while todo:
        path = todo.pop(0).resolve()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BuildError(f"cannot read {path}, the body of a task type: {error}") from None
        yield path, text
        included = (path.parent / name for name in re.findall(r'^\s*#\s*include\s*"(.+)"', text, re.MULTILINE))
        todo += [each for each in included if each.is_file()]
