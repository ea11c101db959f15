"""Programs whose matrices do not have norm weights and scales folded in: tasks multiply by them, and the logits are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.families import FAMILIES, assert_near, make, random_prompts
from support.helpers import ROOT, Runner
from support.machine import command, run_job
from support.tiny import relative_error

JOB = ROOT / "tests" / "support" / "factors_job.py"


def at_some_number_of_ranks() -> list[Any]:
    """Every family at 1, 2 and 3 ranks, of which one is not slow."""
    return [
        pytest.param(name, num_ranks, marks=[pytest.mark.slow] * (num_ranks != 1 + index % 3))
        for index, name in enumerate(FAMILIES)
        for num_ranks in (1, 2, 3)
    ]


@pytest.mark.parametrize("buckets", ["40"])
@pytest.mark.parametrize(("name", "num_ranks"), at_some_number_of_ranks())
def test_logits(
    name: str, num_ranks: int, buckets: str, rng: np.random.Generator, tmp_path: Path, runner: Runner
) -> None:
    """Both forms are near transformers' logits and near each other, but not the same, as they round elsewhere."""
    model = make(name, int(rng.integers(1 << 30)))
    prompts, result = random_prompts(model, rng), tmp_path / "logits.npy"
    arguments = [str(tiny.save(model, tmp_path)), json.dumps(prompts), str(result), buckets]
    run_job(runner, command(JOB, *arguments, num_ranks=num_ranks))
    folded, unfolded = np.load(result)
    allowed = assert_near(model, prompts, unfolded, "factors left")
    between = relative_error(*(torch.from_numpy(form).double() for form in (unfolded, folded)))
    assert 0 < between <= allowed, f"{between:.3g} between the forms, {allowed:.3g} allowed"
