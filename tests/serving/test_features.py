"""Logits of models with post-norms, without norms in front, with GeGLU, scales, offsets and a softcap, against torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.features import STYLES, model_of, random_tensors
from support.features_reference import FeaturesReference
from support.graph_runs import assert_done, run_job
from support.machine import require
from support.tiny import relative_error
from support.tiny_config import tiny_config

from distmk.abi import MAX_ROWS

NOISE = 1e-5  # more than that of float32 sums in another order
ODD = {"hidden_size": 90, "intermediate_size": 75, "qkv_bias": True, "o_bias": True, "mlp_bias": True}
Models = list[tuple[str, tuple[int, ...]]]  # styles, and the sizes of hosts: (): all ranks share memory
CASES: list[tuple[str, int, dict[str, Any], Models]] = [
    ("host", 1, {}, [(style, ()) for style in STYLES]),
    ("host", 2, {"qk_norm": True}, [("gemma", ()), ("olmo", ())]),
    ("host", 3, ODD, [("gemma", ()), ("granite", ()), ("mixed", ()), ("gemma", (1, 2))]),
    ("emulated", 2, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "qk_norm": True}, [("gemma", ())]),
]


@pytest.mark.parametrize(("backend", "num_ranks", "sizes", "models"), CASES)
def test_logits(
    backend: str,
    num_ranks: int,
    sizes: dict[str, Any],
    models: Models,
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    """As near to a reference that rounds alike as that is to one that does not round; where no number was rounded to the other
    side, which is required of some narrow prompts, much nearer.

    Prompts: of a narrow iteration, with few rows and with many; and of a wide one, with narrow ones behind it.
    """
    require(backend, num_ranks)
    config, seed = tiny_config(**sizes), int(rng.integers(1 << 30))
    print("seed", seed, sizes)
    prompts = [
        (rng.integers(0, config.vocab_size, length).tolist(), new)
        for length, new in ((1, 4), (13, 2), (20, 1), (18, 3))
    ]
    options = {"backend": backend, "workers": 3, "sizes": sizes, "models": models, "seed": seed, "prompts": prompts}
    assert_done(run_job(tmp_path, "features", num_ranks, **options, out=str(tmp_path / "found")))
    found = json.loads((tmp_path / "found").read_text())
    assert len(found) == len(models) * len(prompts)
    num_alike = 0
    for each in found:
        model = model_of(config, each["style"])
        tensors = random_tensors(model, np.random.default_rng(seed))
        exact, rounded = (FeaturesReference(model, tensors, rounds).logits(each["ids"])[-1] for rounds in (False, True))
        got, rounding = torch.tensor(each["logits"]).double(), float((rounded - exact).abs().max())
        off, at = (got - rounded).abs().max(0)
        what = f"{each['style']}, {len(each['ids'])} tokens"
        print(f"{what}: relative error {relative_error(got, exact):.2g}, off by {off:.2g}, rounding {rounding:.2g}")
        num_alike += len(each["ids"]) <= MAX_ROWS and off < NOISE
        assert off <= 3 * rounding, f"{what}: {got[at]} at token {at}, expected {rounded[at]} +- {rounding:.2g}"
        best = float(got.max() - got[each["token"][0]])
        assert best <= 3 * rounding, f"{what}: token {each['token']} is {best} below the best"
    assert num_alike >= len(models) // 2, "logits are not rounded as they should be"
