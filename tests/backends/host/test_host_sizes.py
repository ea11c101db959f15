"""Decoding at several host sizes: transformers' greedy tokens, the same bits on all ranks, and as many messages as planned.

All ranks share memory here: the order of additions and the messages are the program's, whatever carries them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.graph_runs import assert_done, run_job
from support.machine import FAR, on, require
from support.tiny import Reference, check_greedy

pytestmark = pytest.mark.timeout(120)

MAX_NEW = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A Llama with heads for six ranks, and enough columns that its all-reduces have several blocks."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 528, "intermediate_size": 600}
    sizes["head_dim"] = 16  # which the emulator's kernel takes
    made = tiny.make("llama", seed=3, **sizes)
    return tiny.save(made, tmp_path_factory.mktemp("hosts")), Reference(made)


@pytest.mark.drawn(1)
@pytest.mark.whole
@pytest.mark.parametrize(
    ("backend", "host_sizes"),
    [
        on("host", [(1, 1)], slow=True),
        ("host", [(1, 1, 1), (2, 1)]),
        ("host", [(2, 2)]),
        on("host", [(3, 2)], slow=True),
        on("host", [(2, 2, 2)], slow=True),
        ("emulated", [(1, 1)]),
    ],
    ids=str,
)
def test_decode(tmp_path: Path, model: tuple[Path, Reference], backend: str, host_sizes: list[tuple[int, ...]]) -> None:
    """Of the emulator, the network reads what is put as late as it may."""
    folder, reference = model
    require(backend)
    source = np.random.default_rng(7)
    prompts = [source.integers(0, tiny.SIZES["vocab_size"], length).tolist() for length in (1, 5, 19, 3)]
    sizes: dict[str, Any] = {"host_sizes": host_sizes, "workers": 3, "max_new": MAX_NEW, "prompts": prompts}
    out = tmp_path / "tokens.json"
    sizes |= {"backend": backend, "model": str(folder), "out": str(out)}
    assert_done(run_job(tmp_path, "hosts", sum(host_sizes[0]), FAR if backend == "emulated" else {}, **sizes))
    for name, all_tokens in json.loads(out.read_text()).items():
        assert [len(tokens) for tokens in all_tokens] == [MAX_NEW] * len(prompts)
        for prompt, tokens in zip(prompts, all_tokens, strict=True):
            check_greedy(reference, prompt, tokens, name)
