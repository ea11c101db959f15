"""Every family, from a folder and from GGUF: logits no further from float32 than transformers' own bf16 run, at 1 to 3 ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QuantType
from support import tiny
from support.families import FAMILIES, IN_GGUF, make
from support.gguf_files import write_gguf
from support.tiny import Reference, relative_error

from distmk import LLM

LENGTHS = (5, 17, 18, 40, 41)


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, form: str, rng: np.random.Generator, tmp_path: Path) -> None:
    seed, num_ranks = int(rng.integers(1 << 30)), 1 + list(FAMILIES).index(name) % 3
    if form == "gguf":
        model, num_ranks = make(name, seed, **IN_GGUF.get(name, {})), 1
        write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), QuantType.BF16)
    else:
        model = make(name, seed)
        tiny.save(model, tmp_path)
    reference = Reference(model)
    prompts = [[int(token) for token in rng.integers(0, model.config.vocab_size, length)] for length in LENGTHS]
    exact = torch.stack([reference.exact(ids)[-1] for ids in prompts])
    theirs = torch.stack([reference.bf16(ids)[-1] for ids in prompts])
    with LLM(str(tmp_path), tensor_parallel_size=num_ranks, num_workers=2, keep_logits=True, max_model_len=64) as llm:
        ours = torch.stack([torch.from_numpy(llm.compute_logits(ids).copy()).double() for ids in prompts])
    error, allowed = relative_error(ours, exact), relative_error(theirs, exact)
    print(f"{num_ranks} ranks: relative error {error:.2g}; transformers in bf16: {allowed:.2g}")
    assert error <= 1.1 * allowed, f"{name}: off by {error:.3g}, most at prompt, token {worst(ours - exact)}"


def worst(difference: torch.Tensor) -> list[int]:
    return [int(index) for index in np.unravel_index(int(difference.abs().argmax()), difference.shape)]
