"""Configs are read as transformers reads them, or refused with one line."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from distmk.errors import ModelError
from distmk.model.presets import PRESETS
from distmk.model.rope import Llama3Scaling, inv_freq
from distmk.models import config_from_hf

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_dict(config: LlamaConfig | Qwen3Config) -> dict[str, Any]:
    """What save_pretrained would write for a causal model of this config."""
    name = "Qwen3ForCausalLM" if isinstance(config, Qwen3Config) else "LlamaForCausalLM"
    return json.loads(config.to_json_string()) | {"architectures": [name]}


def llama(**changes: Any) -> dict[str, Any]:
    """A small valid Llama config.json; a change to None removes the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config |= changes
    return {key: value for key, value in config.items() if value is not None}


@pytest.mark.parametrize(
    "hf",
    [
        LlamaConfig(),
        LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=32, attention_bias=True),
        LlamaConfig(mlp_bias=True, tie_word_embeddings=True, eos_token_id=[5, 6], bos_token_id=None),
        LlamaConfig(max_position_embeddings=131072, rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5}),
        Qwen3Config(),
        Qwen3Config(
            hidden_size=64, num_key_value_heads=4, attention_bias=True, tie_word_embeddings=True, eos_token_id=7
        ),
    ],
    ids=lambda hf: type(hf).__name__,
)
def test_reads_what_transformers_writes(hf: LlamaConfig | Qwen3Config) -> None:
    c = config_from_hf(hf_dict(hf), "config.json")
    assert c.family == hf.model_type
    assert (c.hidden_size, c.intermediate_size, c.num_layers) == (
        hf.hidden_size,
        hf.intermediate_size,
        hf.num_hidden_layers,
    )
    assert (c.num_heads, c.num_kv_heads, c.head_dim) == (hf.num_attention_heads, hf.num_key_value_heads, hf.head_dim)
    assert (c.vocab_size, c.max_position) == (hf.vocab_size, hf.max_position_embeddings)
    assert (c.rms_norm_eps, c.rope_theta) == (hf.rms_norm_eps, hf.rope_parameters["rope_theta"])
    assert c.tie_embeddings == hf.tie_word_embeddings
    assert (c.qkv_bias, c.o_bias) == (hf.attention_bias, hf.attention_bias)
    assert c.mlp_bias == getattr(hf, "mlp_bias", False)
    assert c.qk_norm == (hf.model_type == "qwen3")
    eos = hf.eos_token_id
    assert c.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    assert c.bos_token_id == hf.bos_token_id


def test_old_and_new_rope_keys_agree() -> None:
    old = llama(rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    new = llama(rope_theta=None, rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5})
    assert config_from_hf(old, "a") == config_from_hf(new, "b")
    assert config_from_hf(old, "a").rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    older = llama(rope_scaling={"type": "llama3"} | {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_type"})
    assert config_from_hf(older, "c").rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert config_from_hf(llama(rope_scaling={"rope_type": "default"}), "d").rope_scaling is None


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
@pytest.mark.parametrize("scaled", [False, True])
def test_inv_freq_matches_transformers(head_dim: int, theta: float, scaled: bool) -> None:
    rope = (LLAMA3_ROPE if scaled else {"rope_type": "default"}) | {"rope_theta": theta}
    hf = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )
    want = LlamaRotaryEmbedding(hf).inv_freq.numpy()
    got = inv_freq(config_from_hf(hf_dict(hf), "config.json"))
    assert got.dtype == np.float32
    assert got.shape == want.shape == (head_dim // 2,)
    # torch's float32 power may be a unit in the last place off, and the division behind it another; a blended frequency
    # goes with up to 10/3 times the relative error of the one that it is made of.
    limit = 2 * 2**-23 * (10 / 3 if scaled else 1)
    worst = int(np.abs(got / want - 1).argmax())
    assert abs(got[worst] / want[worst] - 1) < limit, f"index {worst}: got {got[worst]!r}, want {want[worst]!r}"


def test_rope_freq_factors_divide() -> None:
    """Llama 3.1's scaling given as factors (as GGUF files do) is the same as computing it."""
    scaled = config_from_hf(llama(head_dim=64, rope_theta=5e5, rope_scaling=LLAMA3_ROPE), "config.json")
    plain = dataclasses.replace(scaled, rope_scaling=None)
    factors = tuple((inv_freq(plain) / inv_freq(scaled)).tolist())
    got = inv_freq(dataclasses.replace(plain, rope_freq_factors=factors))
    np.testing.assert_allclose(got, inv_freq(scaled), rtol=3e-7)


def test_presets() -> None:
    assert set(PRESETS) == {
        "smollm2-135m", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "llama-3.1-8b", "llama-3.1-70b"
    }  # fmt: skip
    # Parameter counts as published (embeddings counted once when tied), to within rounding of their names.
    from distmk.weights import expected_tensors

    published = {
        "smollm2-135m": 134_515_008, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,
        "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264,
        "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    }  # fmt: skip
    for name, config in PRESETS.items():
        assert sum(int(np.prod(shape)) for shape in expected_tensors(config).values()) == published[name], name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM is not supported"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": None, "model_type": "gemma"}, "model type gemma is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'; a whole number"),
        ({"hidden_size": -64, "head_dim": 16}, "hidden_size is -64; it must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": 1 << 30}, "num_layers is 1073741824; at most 1024 are believable"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 15}, "head_dim is 15; rotary embedding needs an even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "give it no window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer type 'chunked_attention' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types is 1 entries; a list of one type for each of 2 layers"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "mistral"}, "LlamaForCausalLM and model type mistral contradict each other"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e5}}}, "full_attention is an object; one set"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta is null"),
        (
            {"rope_scaling": {"type": "proportional"}},
            "RoPE type 'proportional' is not supported; supported are default, lin",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}}, "RoPE type ['yarn'] is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor is 0.5; it must be positive, from 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, "beta_fast is -1"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta is 1; RoPE type 'yarn'"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": 3}},
            "long_factor is 3; a list of numbers",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor has 1 numbers",
        ),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": "x"}}, "rope_scaling: factor is 'x'"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": 0}}, "must be positive"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "must be above"),
        ({"rope_scaling": 8}, "rope_scaling is 8; an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; true or false"),
    ],
)
@pytest.mark.timeout(10)  # a number of layers is refused before anything is as long
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as e:
        config_from_hf(llama(**changes), "models/x/config.json")
    assert message in str(e.value)
    assert str(e.value).startswith("models/x/config.json")
    assert "\n" not in str(e.value)


OTHERS: dict[
    str, tuple[Any, tuple[Any, ...]]
] = {  # keys of other models: a value that is refused, and those that change nothing
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "clip_qkv", "scale_depth"), (1.0, ())),
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb"), (2.0, (1, 1.0))
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), (1.0, (0, 0.0))),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (1, (0,))),
    **dict.fromkeys(
        (
            "use_qk_norm",
            "qk_layernorm",
            "alibi",
            "use_parallel_residual",
            "parallel_attn",
            "use_bidirectional_attention",
        ),
        (True, (False,)),
    ),
    "no_rope_layers": ([1, 0], ([], {})),
    "per_layer_config": ({"1": {"head_dim": 8}}, ([], {})),
    "is_causal": (False, (True,)),
    "transformers_weights": ("other.safetensors", ("model.safetensors", "model.safetensors.index.json")),
    "compression_config": ({"format": "dense"}, ({},)),
}


@pytest.mark.parametrize("key", OTHERS)
def test_keys_of_other_models(key: str) -> None:
    refused, neutral = OTHERS[key]
    with pytest.raises(ModelError) as e:
        config_from_hf(llama(**{key: refused}), "config.json")
    assert str(e.value) == f"config.json: {key} is {refused!r}, which would change the result and is not supported"
    for value in (*neutral, None):
        assert config_from_hf(llama() | {key: value}, "config.json") == config_from_hf(llama(), "config.json")


def test_qk_norm_is_qwen3s_own() -> None:
    qwen3 = llama(architectures=["Qwen3ForCausalLM"])
    assert config_from_hf(qwen3 | {"use_qk_norm": True}, "a") == config_from_hf(qwen3, "a")
    with pytest.raises(ModelError, match="alibi is True"):
        config_from_hf(qwen3 | {"alibi": True}, "a")


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    c = config_from_hf(llama(num_key_value_heads=None, rope_theta=None, eos_token_id=None), "config.json")
    assert (c.num_kv_heads, c.head_dim, c.rope_theta, c.eos_token_ids) == (4, 16, 10000.0, (2,))
    qwen3 = config_from_hf(llama(architectures=["Qwen3ForCausalLM"]), "config.json")
    assert qwen3.head_dim == Qwen3Config().head_dim == 128


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden_size", 64.0, "int"),
        ("num_layers", None, "int"),
        ("vocab_size", True, "int"),
        ("rms_norm_eps", "1e-5", "float"),
        ("bos_token_id", "a", r"int \| None"),
        ("eos_token_ids", 2, r"tuple\[int, ...\]"),
        ("windows", (4, "a"), r"tuple\[int \| None, ...\]"),
        ("rope_scaling", {"type": "yarn"}, r"RopeScaling \| None"),
        ("qkv_bias", 1, "bool"),
    ],
)
def test_values_of_wrong_kinds(name: str, value: Any, expected: str) -> None:
    config = PRESETS["smollm2-135m"]
    with pytest.raises(ModelError, match=rf"^model config: {name} is .*; expected {expected}$"):
        dataclasses.replace(config, **{name: value})
    assert dataclasses.replace(config, eos_token_ids=[3, 4]).eos_token_ids == (3, 4)  # as a config.json has them
