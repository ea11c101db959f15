"""Puts scripts/ on sys.path: the modules of scripts/bench.py are in scripts/benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
