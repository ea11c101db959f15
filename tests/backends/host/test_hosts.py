"""Decoding at several host sizes: transformers' greedy tokens, the same bits on all ranks, and as many messages as planned.

All ranks share memory here: the order of additions and the messages are the program's, whatever carries them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import tiny
from support.graph_runs import assert_done, run_job
from support.tiny import Reference, check_greedy

pytestmark = pytest.mark.timeout(120)

MAX_NEW = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A Llama with heads for six ranks, and wide enough that its all-reduces have several blocks."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 528, "intermediate_size": 600}
    made = tiny.make("llama", seed=3, **sizes)
    return tiny.save(made, tmp_path_factory.mktemp("hosts")), Reference(made)


@pytest.mark.parametrize(
    "host_sizes", [[(1, 1)], [(1, 1, 1), (2, 1)], [(2, 2)], [(3, 2)], [(2, 2, 2)]], ids=lambda sizes: str(sizes[-1])
)
def test_decode(tmp_path: Path, model: tuple[Path, Reference], host_sizes: list[tuple[int, ...]]) -> None:
    folder, reference = model
    source = np.random.default_rng(7)
    prompts = [source.integers(0, tiny.SIZES["vocab_size"], length).tolist() for length in (1, 5, 19, 3)]
    sizes = {"host_sizes": host_sizes, "workers": 3, "max_new": MAX_NEW, "prompts": prompts}
    out = tmp_path / "tokens.json"
    assert_done(run_job(tmp_path, "hosts", sum(host_sizes[0]), model=str(folder), out=str(out), **sizes))
    for name, all_tokens in json.loads(out.read_text()).items():
        assert [len(tokens) for tokens in all_tokens] == [MAX_NEW] * len(prompts)
        for prompt, tokens in zip(prompts, all_tokens, strict=True):
            check_greedy(reference, prompt, tokens, name)
