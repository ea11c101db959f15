"""The benchmark's peers compute what transformers does, alone and with tensor parallelism."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.helpers import Runner, under_mpirun

JOB = Path(__file__).with_name("peers_job.py")
STEPS = 6
# Query and key/value heads: KV heads shared by two, and by one.
HEADS = {"qwen3": (8, 4), "llama": (6, 6)}


def run(runner: Runner, folder: Path, prompts: list[list[int]], num_ranks: int) -> tuple[np.ndarray, list[list[int]]]:
    output = runner.folder / f"{num_ranks}.json"
    command = [sys.executable, str(JOB), str(folder), json.dumps(prompts), str(STEPS), str(output)]
    done = runner.run(under_mpirun(num_ranks)(command) if num_ranks > 1 else command)
    assert done.status == 0, done.stderr[-3000:]
    return np.load(output.with_suffix(".npy")), json.loads(output.read_text())


def check(reference: tiny.Reference, prompts: list[list[int]], got: np.ndarray, tokens: list[list[int]]) -> None:
    want = reference.exact(prompts[0], last=1)[0].numpy()
    worst = int(np.abs(got - want).argmax())
    assert np.abs(got - want).max() < 1e-3, f"token {worst}: {got[worst]} instead of {want[worst]}"
    for number, (prompt, new) in enumerate(zip(prompts, tokens, strict=True)):
        assert len(new) == STEPS + 1
        tiny.check_greedy(reference, prompt, new, f"prompt {number}")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("family", "num_ranks"), [("qwen3", 1), ("llama", 2)])
def test_as_transformers(family: tiny.Family, num_ranks: int, runner: Runner, rng: np.random.Generator) -> None:
    """Prompts of several lengths at once, then steps of all of them; sizes that do not divide where they need not."""
    num_q, num_kv = HEADS[family]
    changes: dict[str, Any] = {"num_attention_heads": num_q, "num_key_value_heads": num_kv, "hidden_size": 48}
    if family == "llama":
        changes["rope_parameters"] = tiny.LLAMA3_ROPE
    changes["tie_word_embeddings"] = bool(rng.integers(2))
    model = tiny.make(family, int(rng.integers(1000)), intermediate_size=75, vocab_size=203, **changes)
    folder = tiny.save(model, runner.folder / "model")
    prompts = [[int(token) for token in rng.integers(0, 203, length)] for length in (17, 1, 5)]
    check(tiny.Reference(model), prompts, *run(runner, folder, prompts, num_ranks))


def test_triton_attention() -> None:
    """The compiled peer's attention for GPUs, in Triton's interpreter: new K at first, middle and last positions of a split."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1: this runs without a GPU")
    from benchmark.flash import FlashAttention
    from benchmark.model import Functions, Sizes

    for num_q, num_kv, dim, max_len, places, normed in (
        (8, 2, 32, 200, [0, 31, 32, 150], True),
        (4, 4, 64, 300, [299], False),
        (4, 1, 32, 5000, [4321, 127, 128], True),
    ):
        functions = Functions(Sizes(64, num_q, num_kv, dim, 1e-6, 0, True))
        batch, positions = len(places), torch.tensor(places)
        qkv = torch.randn(batch, (num_q + 2 * num_kv) * dim)
        norms = [1 + 0.2 * torch.randn(dim) if normed else None for _ in "qk"]
        angles = torch.randn(max_len, dim // 2)
        rope = torch.cat([angles.cos(), angles.sin()], dim=-1)
        caches = torch.randn(2, batch, num_kv, max_len, dim)
        wanted = caches.clone()
        want = functions.attend(qkv, positions[:, None], *wanted, *norms, rope)
        got = FlashAttention(functions.sizes, positions, max_len)(qkv, *caches, *norms, rope)
        for what, left, right in (("outputs", got, want), ("caches", caches, wanted)):
            error = (left - right).abs()
            assert error.max() < 1e-5, f"{what} at {places}: {np.unravel_index(int(error.argmax()), error.shape)}"
