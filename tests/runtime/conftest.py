"""A tiny model that generates for minutes, to have time to do things to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import DISTMK
from ranks_in_process import tiny_config

ENDLESS = ("--prompt-ids", "1,2,3,4,5", "--ignore-eos", "--workers", "1")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny model whose context lets it generate for minutes."""
    config = tiny_config()
    names = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta")
    fields = {name: getattr(config, name) for name in names} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": 200_000,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    path = tmp_path_factory.mktemp("endless") / "config.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.fixture
def command(endless: Path) -> Callable[..., list[str]]:
    """The command of a generate; without `tokens` it would take minutes."""

    def make(*more: str, tokens: int = 150_000) -> list[str]:
        model = ("--model", str(endless), "--load-format", "dummy", "--max-model-len", str(max(64, tokens + 16)))
        return [*DISTMK, "generate", *model, *ENDLESS, "--max-new-tokens", str(tokens), *more]

    return make
