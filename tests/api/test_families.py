"""Every family, from a folder and from GGUF: logits as near to float32 as transformers' own bf16 run, at 1 to 3 ranks and in the
emulator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QuantType
from support import tiny
from support.families import FAMILIES, IN_GGUF, OF_256, assert_logits, make, make_for_gpu
from support.gguf_files import write_gguf
from support.machine import require


def at_each_number_of_ranks() -> list[Any]:
    """Every family at 1, 2 and 3 ranks, two of which are slow."""
    return [
        pytest.param(name, num_ranks, marks=[pytest.mark.slow] * (num_ranks != 1 + index % 3))
        for index, name in enumerate(FAMILIES)
        for num_ranks in (1, 2, 3)
    ]


@pytest.mark.whole
@pytest.mark.parametrize(("name", "num_ranks"), at_each_number_of_ranks())
def test_logits(name: str, num_ranks: int, rng: np.random.Generator, tmp_path: Path) -> None:
    model = make(name, int(rng.integers(1 << 30)))
    assert_logits(model, tiny.save(model, tmp_path), "host", num_ranks, rng)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.in_gguf])
def test_logits_of_gguf(name: str, rng: np.random.Generator, tmp_path: Path) -> None:
    model = make(name, int(rng.integers(1 << 30)), **IN_GGUF.get(name, {}))
    path = tmp_path / "m.gguf"
    write_gguf(path, model.config, model.state_dict(), QuantType.BF16)
    assert_logits(model, path, "host", 1, rng)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "num_ranks", "changes"),
    [
        *(("gemma2", 2, {}), ("gemma3", 1, {}), ("granite", 1, {}), ("phi3", 1, {}), ("phi4", 1, {})),
        *((name, 1, {"head_dim": 256}) for name in OF_256),
    ],
)
def test_logits_in_the_emulator(
    name: str, num_ranks: int, changes: dict[str, Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    require("emulated", num_ranks)
    model = make_for_gpu(name, int(rng.integers(1 << 30)), **changes)
    assert_logits(model, tiny.save(model, tmp_path), "emulated", num_ranks, rng)
