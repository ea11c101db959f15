"""Layers with sliding windows: the same logits and tokens as transformers, in prompts and answers longer than the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.machine import on, require
from support.tiny import Reference, check_greedy, relative_error

from distmk import LLM, SamplingParams

pytestmark = pytest.mark.timeout(200)

WINDOW = 21
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 64,  # which transformers' Qwen2 derives: a single row's combine is fused on GPUs
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 2,
}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny.make("qwen2", 5, **SIZES))


@pytest.fixture(scope="module")
def model(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(reference.model, tmp_path_factory.mktemp("windows"))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("backend", "num_ranks", "row_buckets"),
    [
        ("host", 1, "16,512"),
        ("host", 2, "16,40"),
        ("host", 3, "16"),
        ("emulated", 1, "16,40"),
        *(on("cuda", ranks, row_buckets, num_ranks=ranks) for ranks in (1, 2) for row_buckets in ("16,512", "16")),
    ],
)
def test_windows(
    model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, backend: str, num_ranks: int, row_buckets: str
) -> None:
    """Prompts of several windows, by job and by slab iterations, and an answer that outgrows the window."""
    require(backend, num_ranks)
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    rng = np.random.default_rng(num_ranks)
    prompts = [[int(token) for token in rng.integers(0, 203, length)] for length in (2, WINDOW + 1, 70)]
    ours, theirs, exact = [], [], []
    with LLM(
        str(model),
        backend=backend,
        tensor_parallel_size=num_ranks,
        num_workers=None if backend == "cuda" else 2,
        max_model_len=90,
        keep_logits=True,
    ) as llm:
        for ids in prompts:
            got = torch.from_numpy(llm.compute_logits(ids).copy()).double()
            want, rounded = reference.exact(ids, 1)[-1], reference.rounded(ids, 1, jobs=True)[-1]
            off, rounding = float((got - rounded).abs().max()), float((rounded - want).abs().max())
            assert off <= 3 * rounding, f"prompt of {len(ids)}: off by {off:.3g}, rounding {rounding:.3g}"
            ours, theirs, exact = [*ours, got], [*theirs, reference.bf16(ids, 1)[-1]], [*exact, want]
        params = SamplingParams(max_tokens=4 if backend == "emulated" else WINDOW + 12, ignore_eos=True)
        outputs = llm.generate(prompts, params)
    error, their_error = (relative_error(torch.stack(each), torch.stack(exact)) for each in (ours, theirs))
    assert error <= their_error
    for ids, output in zip(prompts, outputs, strict=True):
        check_greedy(reference, ids, output.outputs[0].token_ids, f"prompt of {len(ids)}")


def test_windows_matter(reference: Reference) -> None:
    """The prompts above tell a window from one that is a token wider."""
    ids = [int(token) for token in np.random.default_rng(1).integers(0, 203, WINDOW + 1)]
    wider = tiny.make("qwen2", 5, **SIZES | {"sliding_window": WINDOW + 1})
    moved = float((Reference(wider).exact(ids, 1) - reference.exact(ids, 1)).abs().max())
    assert moved > 3 * float((reference.rounded(ids, 1, jobs=True) - reference.exact(ids, 1)).abs().max())
