#!/usr/bin/env python3
"""Write csrc/abi.h from distmk/abi and the registered task types, and the list of weight formats. `--check` only compares."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distmk.tasks import abi_header

CSRC = Path(__file__).resolve().parent.parent / "csrc"


def main() -> int:
    texts = {
        CSRC / "abi.h": abi_header.render(),
        CSRC / "host/formats/all.h": abi_header.render_formats(),
        CSRC / "device/formats/all.cuh": abi_header.render_packed_formats(),
    }
    for path, text in texts.items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
            print(
                f"wrote {path.name}: {len(text.splitlines())} lines, pointers of {ctypes.sizeof(ctypes.c_void_p)} bytes"
            )
        elif not path.exists() or path.read_text() != text:
            print(f"{path.name} is not what distmk says; run python scripts/gen_abi.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
