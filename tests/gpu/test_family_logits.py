"""Every family with heads of 128 elements, and of 256 where models have them: logits as near to float32 as transformers' own bf16
run, on GPUs.

python -m pytest -q -rs tests/gpu/test_family_logits.py             # 1 and 2 GPUs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.families import FAMILIES, OF_256, assert_logits, make_for_gpu
from support.machine import on, require


@pytest.mark.parametrize(("backend", "num_ranks"), [on("cuda", 1), on("cuda", 2, num_ranks=2)])
@pytest.mark.parametrize(
    ("name", "changes"), [*((name, {}) for name in FAMILIES), *((name, {"head_dim": 256}) for name in OF_256)]
)
def test_logits(
    backend: str, num_ranks: int, name: str, changes: dict[str, Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    require(backend, num_ranks)
    model = make_for_gpu(name, int(rng.integers(1 << 30)), **changes)
    assert_logits(model, tiny.save(model, tmp_path), backend, num_ranks, rng)
