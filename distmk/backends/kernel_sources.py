"""The source files of the GPU's kernel, for nvcc and for the emulator's compiler."""

from __future__ import annotations

from pathlib import Path

from distmk.backends.build_cache import csrc_dir
from distmk.backends.own_sources import BODIES_HEADER, OwnSources

PACKED_FLAG = "-DDISTMK_PACKED"
"""For the kernel of programs with packed weights. Its pipeline has other stages, so others have a kernel without it."""


def kernel_sources() -> list[Path]:
    """All files that the kernel is compiled from."""
    root = csrc_dir()
    device = [path for path in (root / "device").rglob("*") if path.is_file()]
    return [root / "abi.h", *(root / "platform").iterdir(), *(root / "runtime").glob("*.h"), *device]


def translation_unit(own: OwnSources | None = None) -> str:
    """One source that includes the kernel, every header of the device, and the bodies of registered types.

    So a new task body is found by being there, and is inlined where it runs.
    """
    headers = sorted(path.relative_to(csrc_dir()).as_posix() for path in (csrc_dir() / "device").rglob("*.cuh"))
    headers += [BODIES_HEADER] if own else []
    return "".join(f'#include "{name}"\n' for name in headers)
