"""Heads of which only the first elements rotate: configs, the order of the elements, and the rotary table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.reference import apply_rope
from support.tiny_config import tiny_config
from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from distmk.errors import ModelError
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.rope import rope_table, rotation_order
from distmk.models import build_model, config_from_hf, expected_tensors

POSITIONS = 40
PHI4_MINI: dict[str, Any] = {  # microsoft/Phi-4-mini-instruct, with other numbers in the lists
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "bos_token_id": 199999, "eos_token_id": 199999,
    "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
    "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3",
    "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 199999,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}, "rope_theta": 10000.0,
    "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 200064,
}  # fmt: skip


def test_phi4_mini() -> None:
    config = config_from_hf(PHI4_MINI, "config.json")
    assert (config.head_dim, config.rotary_dim, config.max_position) == (128, 96, 131072)
    assert sum(map(math.prod, expected_tensors(config).values())) == 3_836_021_760  # as published
    values = {key: value for key, value in PHI4_MINI.items() if key != "original_max_position_embeddings"}
    without = config_from_hf(values, "config.json")
    assert without.rope_scaling == config.rope_scaling, "transformers' default is 4096, whatever the longest context"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.51}, "65 elements of a head_dim of 128 rotate; an even number was expected"),
        ({"partial_rotary_factor": 0.001}, "0 elements of a head_dim of 128 rotate"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be positive, up to 1"),
        ({"partial_rotary_factor": "all"}, "partial_rotary_factor is 'all'; a number"),
        (
            {"partial_rotary_factor": 0.5},
            "short_factor has 48 numbers; head_dim 128, of which 64 elements rotate, needs 32",
        ),
        ({"partial_rotary_factor": None}, "short_factor has 48 numbers; head_dim 128 needs 64 of them"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        config_from_hf(PHI4_MINI | changes, "config.json")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (16, 12), (16, 2), (80, 20), (128, 96)])
def test_scores_are_those_of_transformers(head_dim: int, rotary_dim: int) -> None:
    """Of queries and keys in the order of tasks, rotated by the table as tasks do."""
    config = tiny_config(head_dim=head_dim, partial_rotary_dim=rotary_dim, rope_theta=1e3)
    q, k = (torch.randn(1, 3, POSITIONS, head_dim) for _ in range(2))
    rope = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": rotary_dim / head_dim}
    theirs = Phi3RotaryEmbedding(
        Phi3Config(hidden_size=3 * head_dim, num_attention_heads=3, pad_token_id=None, rope_parameters=rope)
    )
    want_q, want_k = apply_rotary_pos_emb(q, k, *theirs(q, torch.arange(POSITIONS)[None]))
    order = [i for begin, end in rotation_order(config) for i in range(begin, end)]
    assert sorted(order) == list(range(head_dim))
    got_q, got_k = (apply_rope(x[..., order], torch.from_numpy(rope_table(config, POSITIONS))) for x in (q, k))
    torch.testing.assert_close(got_q @ got_k.mT, (want_q @ want_k.mT).double(), atol=2e-5 * head_dim, rtol=0)


def test_rows_of_a_graph() -> None:
    """Rows of q and k, their biases and norms are in that order, and v is not."""
    config = tiny_config("qwen3-0.6b", qkv_bias=True, partial_rotary_dim=4)
    graph = lower_programs(build_model(config), DecodeOptions(1, 2, max_model_len=64))[0]
    order, plain = [0, 1, *range(4, 10), 2, 3, *range(10, 16)], list(range(16))
    for tensor, num_heads, expected in (
        ("q_proj.weight", 6, order),
        ("q_proj.bias", 6, order),
        ("k_proj.weight", 3, order),
        ("k_proj.bias", 3, order),
        ("v_proj.weight", 3, plain),
        ("v_proj.bias", 3, plain),
        ("q_norm.weight", 1, order),
        ("k_norm.weight", 1, order),
    ):
        found = [
            s for weight in graph.weights for s in weight.segments if s.tensor == f"model.layers.1.self_attn.{tensor}"
        ]
        rows = [row for s in found for row in range(s.row_begin, s.row_end)]
        assert rows == [16 * head + i for head in range(num_heads) for i in expected], tensor
