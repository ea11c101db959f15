"""Every field of transformers' configs is used, changes nothing in transformers either, or is refused with one line."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from distmk.backends.defaults import choose_model_len
from distmk.errors import ModelError, UsageError
from distmk.model.config import ModelConfig
from distmk.model.rope import attention_factor, inv_freq, rope_table
from distmk.models import config_from_hf

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
NAMES = {LlamaConfig: "LlamaForCausalLM", Qwen2Config: "Qwen2ForCausalLM", Qwen3Config: "Qwen3ForCausalLM"}
MODELS = {LlamaConfig: LlamaForCausalLM, Qwen2Config: Qwen2ForCausalLM, Qwen3Config: Qwen3ForCausalLM}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
WINDOWED, FULL = "sliding_attention", "full_attention"

USED: dict[str, Any] = {
    "vocab_size": 62, "hidden_size": 64, "intermediate_size": 41, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 65, "rms_norm_eps": 1e-5, "bos_token_id": 5,
    "eos_token_id": [7, 8], "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
# The types that weights are stored in are in their files; what transformers' calls return is Python's.
INERT: dict[str, tuple[Any, ...]] = {
    "initializer_range": (0.5,), "use_cache": (False,), "pad_token_id": (3,), "pretraining_tp": (2,),
    "attention_dropout": (0.5,), "transformers_version": ("4.1",), "output_hidden_states": (True,), "return_dict": (),
    "dtype": ("float16", "bfloat16"), "chunk_size_feed_forward": (4,), "id2label": ({"0": "a"},), "label2id": ({"a": 0},),
    "problem_type": ("regression",), "is_encoder_decoder": (False,), "hidden_act": ("swish",),
    "use_sliding_window": (False,), "sliding_window": (8, None), "max_window_layers": (0,), "layer_types": ([FULL, FULL],),
}  # fmt: skip
REFUSED: dict[str, Any] = {"hidden_act": "gelu", "architectures": ["GemmaForCausalLM"]}


def config_json(cls: Any, **changes: Any) -> dict[str, Any]:
    """config.json of a small model as people write it: only what is given."""
    return SIZES | {"architectures": [NAMES[cls]]} | changes


def ours(values: dict[str, Any]) -> ModelConfig:
    return config_from_hf(json.loads(json.dumps(values)), "config.json")


@pytest.mark.parametrize("cls", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_every_field(cls: Any) -> None:
    torch.manual_seed(3)
    state = MODELS[cls](cls(**SIZES)).state_dict()
    ids = torch.arange(40)[None] % 61

    def logits(**changes: Any) -> torch.Tensor:
        model = MODELS[cls](cls(**SIZES | changes | {"dtype": None})).eval()
        model.load_state_dict(state)
        with torch.no_grad():
            out = model(ids)
        found: torch.Tensor = out.logits
        return found

    base, expected = ours(config_json(cls)), logits()
    for field in dataclasses.fields(cls):
        name = field.name
        assert name in USED or name in INERT or name in REFUSED, f"transformers' {cls.__name__} has a new field {name}"
        if name in USED:
            changed = ours(config_json(cls, **{name: USED[name]}))
            assert changed != base, name
        for value in INERT.get(name, ()):
            assert ours(config_json(cls, **{name: value})) == base, (name, value)
            assert torch.equal(logits(**{name: value}), expected), (name, value)
        if name in REFUSED:
            with pytest.raises(ModelError) as e:
                ours(config_json(cls, **{name: REFUSED[name]}))
            assert "\n" not in str(e.value)


@pytest.mark.parametrize("cls", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_absent_fields_have_transformers_defaults(cls: Any) -> None:
    """Only the sizes of the model must be there."""
    for name in (
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "bos_token_id",
        "eos_token_id",
    ):
        values = config_json(cls, num_attention_heads=64, hidden_size=128)
        values.pop(name, None)
        theirs, mine = cls(**{key: value for key, value in values.items() if key != "architectures"}), ours(values)
        head_dim = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)  # none in Qwen2Config
        assert (mine.num_kv_heads, mine.head_dim) == (theirs.num_key_value_heads, head_dim), name
        assert (mine.max_position, mine.rms_norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
        assert mine.bos_token_id == theirs.bos_token_id
        assert mine.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


def random_rope(rng: random.Random) -> dict[str, Any]:
    """Keys of rotary embeddings in all the places where configs have had them."""

    def maybe(**values: Any) -> dict[str, Any]:
        return {key: value for key, value in values.items() if rng.random() < 0.5}

    def parameters() -> dict[str, Any]:
        kind = rng.choice(("default", "llama3", "linear", "dynamic", "yarn", "longrope"))
        found = maybe(rope_theta=rng.choice((1e4, 5e5)))
        if kind != "default" or rng.random() < 0.5:
            found[rng.choice(("rope_type", "type"))] = kind
        if kind == "llama3":
            found |= {key: value for key, value in LLAMA3.items() if key != "rope_type"}
        if kind in ("llama3", "yarn", "longrope"):
            found |= maybe(original_max_position_embeddings=rng.choice((16, 48)))
        if kind in ("linear", "dynamic", "yarn"):
            found["factor"] = rng.choice((1.0, 2.0, 3.5))
        if kind == "yarn":
            found |= maybe(beta_fast=8, beta_slow=2.0, truncate=False, mscale=0.7, mscale_all_dim=1.2)
        if kind == "longrope":
            found |= {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1, 2.0, 3.5, 9.0]} | maybe(factor=4.0)
        if kind in ("yarn", "longrope"):
            found |= maybe(attention_factor=1.3)
        return found

    return maybe(
        rope_scaling=rng.choice((None, parameters())),
        rope_parameters=parameters(),
        rope_theta=rng.choice((1e3, 1e6)),
        original_max_position_embeddings=rng.choice((24, 32)),
    )


def test_rotary_frequencies_are_those_of_transformers() -> None:
    """Of every kind, in a context that is shorter or longer than that of pretraining; of all elements of a head and of half of
    them; and the attention factor.
    """
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    seen = set()
    for _ in range(400):
        rope, length = random_rope(rng), rng.choice((10, 40, 64, 200))
        architecture = NAMES[LlamaConfig]
        if rng.random() < 0.5:  # in Phi-3's code a part of a head may rotate
            architecture = "Phi3ForCausalLM"
            rope = {"original_max_position_embeddings": 24} | rope | {"head_dim": 16, "partial_rotary_factor": 0.5}
        config = LlamaConfig(**SIZES | json.loads(json.dumps(rope)))
        kind = config.rope_parameters["rope_type"]
        frequencies = ROPE_INIT_FUNCTIONS.get(kind, Phi3RotaryEmbedding.compute_default_rope_parameters)
        freq, attention = frequencies(config, "cpu", seq_len=length)
        mine = ours(config_json(LlamaConfig, **rope) | {"architectures": [architecture]})
        note = f"seed {seed}: {rope}, {length} positions"
        np.testing.assert_allclose(inv_freq(mine, length), freq.numpy(), rtol=1e-6, err_msg=note)
        assert attention_factor(mine) == pytest.approx(attention, rel=1e-9), note
        table = rope_table(mine, length)
        want = np.cos((length - 1) * freq.numpy()) * attention
        np.testing.assert_allclose(table[-1, : len(want)], want, atol=1e-4)
        seen.add(kind)
    assert seen == {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}


def test_scaling_makes_the_context_longer() -> None:
    """As vLLM derives it: linear and dynamic scaling multiply the config's positions, YaRN those of pretraining."""
    for scaling, want in (
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "dynamic", "factor": 2.0}, 128),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (LLAMA3, 64),
        (LONGROPE, 64),
    ):
        mine = ours(config_json(LlamaConfig, rope_scaling=scaling))
        assert choose_model_len(want, mine) == want
        with pytest.raises(UsageError, match=f"more than the model's context of {want} tokens"):
            choose_model_len(want + 1, mine)


def test_windows_are_those_of_transformers() -> None:
    """Each layer's window; none where all layers see all."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    seen = set()
    for _ in range(600):
        keys: dict[str, Any] = {
            "use_sliding_window": rng.random() < 0.7,
            "sliding_window": rng.choice((None, 12, 40)),
            "max_window_layers": rng.choice((0, 1, 2, 3)),
        }
        if rng.random() < 0.3:
            keys["layer_types"] = [rng.choice((FULL, WINDOWED)) for _ in range(2)]
        keys = {key: value for key, value in keys.items() if rng.random() < 0.8}
        theirs = Qwen3Config(**SIZES, **keys)
        windowed = [kind == WINDOWED for kind in theirs.layer_types]
        if any(windowed) and theirs.sliding_window is None:  # transformers fails when it makes the mask
            with pytest.raises(ModelError, match="give it no window"):
                ours(config_json(Qwen3Config, **keys))
            continue
        mine = ours(config_json(Qwen3Config, **keys))
        want = [theirs.sliding_window if has_window else None for has_window in windowed]
        assert [mine.window(layer) for layer in range(2)] == want, f"seed {seed}: {keys}"
        assert any(windowed) or mine.windows == ()
        seen |= {tuple(want)}
    assert {(None, None), (None, 12), (12, 12), (None, 40)} <= seen


def test_the_longest_context() -> None:
    windowed = ours(config_json(Qwen3Config, use_sliding_window=True, sliding_window=12, max_window_layers=1))
    assert (choose_model_len(None, windowed), choose_model_len(64, windowed)) == (64, 64)
    with pytest.raises(UsageError, match="more than the model's context of 64"):
        choose_model_len(65, windowed)
    assert choose_model_len(None, dataclasses.replace(windowed, max_position=1 << 20)) == 1 << 20


def test_frequencies_of_long_texts_are_asked_for() -> None:
    """The default is the length of pretraining where a longer context changes short texts."""
    for scaling, trained, longest in (
        ({"type": "dynamic", "factor": 2.0}, 64, 128),
        (LONGROPE | {"original_max_position_embeddings": 16}, 16, 64),
        ({"type": "linear", "factor": 4.0}, 256, 256),
    ):
        mine = ours(config_json(LlamaConfig, rope_scaling=scaling))
        assert (choose_model_len(None, mine), choose_model_len(longest, mine)) == (trained, longest)
        unchanged = np.array_equal(inv_freq(mine, trained), inv_freq(mine, 1))
        assert unchanged and (np.array_equal(inv_freq(mine, longest), inv_freq(mine, 1)) == (trained == longest))
