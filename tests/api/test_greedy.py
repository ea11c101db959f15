"""Greedy tokens equal those of transformers on the same weights, at any number of ranks and workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import tiny
from support.tiny import Family, Reference, check_clear_share, check_greedy

from distmk import LLM, SamplingParams

pytestmark = pytest.mark.timeout(200)

HEADS = [(9, 3), (5, 5), (7, 1), (8, 2), (6, 2), (4, 4), (12, 3)]


@pytest.mark.drawn(2)
@pytest.mark.whole
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("draw", range(3))
def test_random_model(family: Family, draw: int, rng: np.random.Generator, tmp_path: Path) -> None:
    """Random heads, sizes and options, on 1 to 4 ranks with 1 to 3 workers: half of these numbers of ranks each."""
    heads = HEADS[int(rng.integers(len(HEADS)))] if draw == 2 else HEADS[draw if family == "llama" else 2 - draw]
    changes = tiny.random_changes(family, heads, rng)
    if draw == 0 and family == "llama":
        changes["rope_parameters"] = tiny.LLAMA3_ROPE
    if draw == 1:
        changes["attention_bias"] = True
    what = f"{family} {changes}"
    print(what)
    model = tiny.make(family, int(rng.integers(1 << 30)), **changes)
    tiny.save(model, tmp_path)
    reference = Reference(model)
    lengths = [1, *(int(n) for n in rng.integers(2, 60, 5))]
    prompts = [[int(token) for token in rng.integers(0, changes["vocab_size"], n)] for n in lengths]
    steps = clear = 0
    first = 1 + (draw + (family == "qwen3")) % 2
    for num_ranks in range(first, min(4, heads[0]) + 1, 2):
        workers = 1 + (num_ranks + draw) % 3
        with LLM(str(tmp_path), tensor_parallel_size=num_ranks, num_workers=workers) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=24))
            outputs += llm.generate(prompts[-1], SamplingParams(max_tokens=24))
        for output in outputs:
            where = f"{what}, {num_ranks} ranks x {workers} workers"
            walk = check_greedy(reference, output.prompt_token_ids, output.outputs[0].token_ids, where)
            steps, clear = steps + walk.steps, clear + walk.clear_steps
    check_clear_share(clear, steps)
