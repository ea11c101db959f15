#!/usr/bin/env python3
"""Write csrc/abi.h from distmk/abi and the registered task types. `--check` only compares."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distmk.tasks import abi_header

PATH = Path(__file__).resolve().parent.parent / "csrc" / "abi.h"


def main() -> int:
    text = abi_header.render()
    if "--check" in sys.argv[1:]:
        if not PATH.exists() or PATH.read_text() != text:
            print("csrc/abi.h is not what distmk/abi says; run python scripts/gen_abi.py", file=sys.stderr)
            return 1
        return 0
    PATH.write_text(text)
    print(f"wrote {PATH.name}: {len(text.splitlines())} lines, pointers of {ctypes.sizeof(ctypes.c_void_p)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
