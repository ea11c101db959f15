"""Models with post-norms, without norms in front, with scaled biases: logits rounded as the runtime rounds, against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.evaluate import evaluate
from support.features import model_of, random_weights
from support.features_reference import RoundedReference
from support.machine import require
from support.tiny_config import tiny_config

from distmk import LLM
from distmk.abi import MAX_ROWS

NOISE = 1e-5  # more than that of float32 sums in another order
LENGTHS = (1, 2, 13, 20, 40)  # of prompts: one row, many of a slab iteration, one of jobs
ODD = {"hidden_size": 90, "intermediate_size": 75, "qkv_bias": True, "o_bias": True, "mlp_bias": True}
GPU = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("backend", "style", "num_ranks", "node_size", "sizes"),
    [
        ("host", "gemma", 3, 2, ODD),
        ("host", "granite", 1, 0, ODD),
        ("host", "mixed", 2, 0, {}),
        ("emulated", "olmo", 1, 0, GPU),
    ],
)
def test_logits(
    backend: str,
    style: str,
    num_ranks: int,
    node_size: int,
    sizes: dict[str, Any],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As near to a reference that rounds alike as that is to the model's definition; where no number was rounded to the other
    side, which is required of some slab prompt, much nearer.
    """
    require(backend, num_ranks)
    if node_size:
        monkeypatch.setenv("DISTMK_VIRTUAL_NODE_SIZE", str(node_size))
    model = model_of(tiny_config(**sizes, rope_theta=1e4), style)  # as `evaluate` has it
    weights = random_weights(model, rng)
    rounded_model = RoundedReference(model.compile(), weights)
    as_torch = {name: torch.from_numpy(value).double() for name, value in weights.items()}
    options: dict[str, Any] = {"backend": backend, "tensor_parallel_size": num_ranks, "num_workers": 2}
    num_alike = 0
    with LLM(model, weights=weights, keep_logits=True, max_model_len=64, **options) as llm:
        for length in LENGTHS:
            ids = rng.integers(0, model.config.vocab_size, length).tolist()
            got = torch.from_numpy(llm.compute_logits(ids).copy()).double()
            rounded = rounded_model.logits(ids)[-1]
            exact = evaluate(model.logits(), as_torch, torch.tensor(ids))[-1]
            off, at = (got - rounded).abs().max(0)
            rounding = float((rounded - exact).abs().max())
            what = f"{length} tokens: off by {off:.2g} at token {at}, rounding {rounding:.2g}"
            print(what)
            num_alike += length <= MAX_ROWS and float(off) < NOISE
            assert off <= 5 * rounding, what
    assert num_alike, "logits are not rounded as they should be"
