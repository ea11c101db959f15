"""Every weight format: its sizes are those of what it packs, and its values those of an oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distmk.abi import WeightFormatId
from distmk.formats import FORMATS, WeightFormat


def test_every_id_has_a_format() -> None:
    assert set(FORMATS) == set(WeightFormatId)


@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=lambda found: found.name)
def test_slab_bytes(weight_format: type[WeightFormat]) -> None:
    rng = np.random.default_rng()
    for paired in (False, True):
        slabs = [int(n) * (1 + paired) for n in rng.integers(1, 60, 4)]
        cols = int(rng.integers(1, 700))
        packed = weight_format.pack(rng.integers(0, 1 << 16, (sum(slabs), cols)).astype(np.uint16), slabs, paired)
        want = sum(weight_format.slab_bytes(rows, cols, tiled=True) for rows in slabs)
        assert packed.nbytes == want, f"slabs {slabs} of {cols} columns"
        assert all(
            weight_format.slab_bytes(rows, cols, tiled=True) % weight_format.copy_align_bytes == 0 for rows in slabs
        )


def test_values_of_bf16() -> None:
    bits = np.random.default_rng().integers(0, 1 << 16, (5, 300)).astype(np.uint16)
    want = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    got = FORMATS[WeightFormatId.BF16].values(bits)
    assert np.array_equal(got, want, equal_nan=True), f"first at {np.argwhere(got != want)[:1]}"
