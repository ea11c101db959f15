"""Shapes and data are drawn afresh every run; the seed of a failure is printed with it."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("DISTMK_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"repeat with DISTMK_TEST_SEED={seed}")
    torch.manual_seed(seed)
    return np.random.default_rng(seed)
