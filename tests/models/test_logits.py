"""Logits are those of transformers to within bf16 rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from tiny import Family, Reference

from distmk import LLM
from distmk.errors import UsageError

LENGTHS = (1, 15, 16, 17, 40)
NOISE_FACTOR = 10  # between two orders of adding up float32, measured on one prompt and met on another


def largest(difference: torch.Tensor) -> tuple[float, int]:
    """The largest magnitude and where it is."""
    at = int(difference.abs().argmax())
    return float(difference[at].abs()), at


@pytest.mark.parametrize(("family", "num_ranks"), [("llama", 1), ("llama", 3), ("qwen3", 2), ("qwen3", 4)])
def test_logits(family: Family, num_ranks: int, rng: np.random.Generator, tmp_path: Path) -> None:
    """Bounds, over all prompts: not further from float32 than transformers' own bf16 run gets, and no further than
    the bf16 cache takes the reference. Where no cached value rounds to the other side, float32 noise alone is left:
    so it must be for at least two of the prompts."""
    changes = tiny.random_changes(family, (9, 3) if num_ranks == 3 else (6, 3), rng)
    print(family, changes)
    model = tiny.make(family, int(rng.integers(1 << 30)), **changes)
    tiny.save(model, tmp_path)
    reference = Reference(model)
    ours, theirs, cache, exactly_met = [], [], [], 0
    with LLM(str(tmp_path), tensor_parallel_size=num_ranks, num_workers=2, keep_logits=True) as llm:
        for length in LENGTHS:
            ids = [int(token) for token in rng.integers(0, changes["vocab_size"], length)]
            got = torch.from_numpy(llm.compute_logits(ids).copy()).double()
            assert got.shape == (changes["vocab_size"],)
            exact, cached = reference.exact(ids)[-1], reference.cached(ids)[-1]
            noise, _ = largest(cached - reference.cached(ids, torch.float64)[-1])
            error, at = largest(got - exact)
            drift, _ = largest(got - cached)
            ours.append(error)
            theirs.append(largest(reference.bf16(ids)[-1] - exact)[0])
            cache.append(largest(cached - exact)[0])
            exactly_met += drift <= NOISE_FACTOR * noise
            print(f"prompt of {length}: off by {error:.3g} at token {at}, noise {noise:.2g}, from cached {drift:.2g}")
            assert drift <= NOISE_FACTOR * noise + cache[-1], f"prompt of {length}, largest error at token {at}"
    assert max(ours) <= max(theirs), f"off by {ours}; transformers in bf16 is off by {theirs}"
    assert exactly_met >= 2, "more than the rounding of the cache tells it from transformers"


def test_smollm2_logits(smollm2: Path, smollm2_reference: Reference) -> None:
    reference = smollm2_reference
    rng = np.random.default_rng(5)
    ours, theirs, cache = [], [], []
    with LLM(str(smollm2), tensor_parallel_size=2, keep_logits=True, max_model_len=64) as llm:
        for length in LENGTHS:
            ids = [int(token) for token in rng.integers(100, 40000, length)]
            got = torch.from_numpy(llm.compute_logits(ids).copy()).double()
            exact = reference.exact(ids)[-1]
            ours.append(largest(got - exact)[0])
            cache.append(largest(reference.cached(ids)[-1] - exact)[0])
            theirs.append(largest(reference.bf16(ids)[-1] - exact)[0])
    assert max(ours) <= max(theirs), f"off by {ours}; transformers in bf16 is off by {theirs}"
    assert max(ours) <= 1.5 * max(cache), f"off by {ours}; a bf16 KV cache alone makes {cache}"


def test_logits_must_be_asked_for(tiny_model: Path) -> None:
    with LLM(str(tiny_model)) as llm, pytest.raises(UsageError, match="keep_logits=True"):
        llm.compute_logits([1])
