"""GGUF files of every architecture are the same models as the Hugging Face folders that they were made from.

The files are written with the gguf package as llama.cpp's converter writes them (`support.gguf_files`), from models made with
transformers: the config must be equal, and every weight, bit for bit.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QuantType
from support import tiny
from support.families import IN_GGUF, make
from support.gguf_files import CONVERSIONS, write_gguf
from test_weights import assert_bits_equal, expect_error
from transformers import PreTrainedModel

from distmk.abi import Scores
from distmk.errors import ModelError
from distmk.model.rope import LOCAL_ROPE, ROPE, rope_table
from distmk.weights import Checkpoint, expected_tensors, open_checkpoint
from distmk.weights.gguf_families import FAMILIES

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.05, 2.7, 9.3],
}
LINEAR = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
NARROW = {
    "hidden_size": 24,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 9,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {}),
    ("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 12, **NARROW}),  # as many layers as the 27B model
    ("gemma2", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 7.0}),
    ("gemma3", {"rope_parameters": LINEAR}),
    ("gemma3", {"num_hidden_layers": 62, "query_pre_attn_scalar": 12, **NARROW}),
    ("gemma3", {"layer_types": ["full_attention"] * 7}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("granite", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 30, "original_max_position_embeddings": 32, "rope_parameters": LONG}),
    ("phi4", {}),
    ("qwen2", {}),
    ("smollm3", {}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(
    ("name", "changes"), MODELS, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_same_as_the_folder(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    file, folder = both(make(name, seed, **{**IN_GGUF.get(name, {}), **changes}), tmp_path)
    family = "llama" if name == "mistral" else folder.config.family
    assert file.config == replace(
        folder.config, family=family, rope_scaling=file.config.rope_scaling, windows=file.config.windows
    )
    for layer in range(file.config.num_layers):
        assert file.config.window(layer) == folder.config.window(layer), layer
    for table in (ROPE, LOCAL_ROPE) if folder.config.local_rope_theta else (ROPE,):
        for num_positions in (20, 60):  # short and long factors of LongRoPE
            want = rope_table(folder.config, num_positions, table)
            np.testing.assert_array_equal(rope_table(file.config, num_positions, table), want)
    assert not file.notes
    assert_same_weights(file, folder)


def both(model: PreTrainedModel, folder: Path) -> tuple[Checkpoint, Checkpoint]:
    tiny.save(model, folder / "hf")
    write_gguf(folder / "m.gguf", model.config, model.state_dict(), QuantType.BF16)
    return open_checkpoint(folder / "m.gguf"), open_checkpoint(folder / "hf")


def assert_same_weights(file: Checkpoint, folder: Checkpoint) -> None:
    shift = (
        1 if file.config.family.startswith("gemma") else 0
    )  # the model adds it again, and where is below float32's bits
    for weight, shape in expected_tensors(file.config).items():
        if len(shape) == 2:
            assert_bits_equal(file.read(weight), folder.read(weight), weight)
        else:
            got, want = (shift + checkpoint.read_vector(weight) for checkpoint in (file, folder))
            np.testing.assert_array_equal(got, want, err_msg=weight)


def test_every_architecture_is_tested() -> None:
    """llama and qwen3 in test_weights_gguf."""
    made = {CONVERSIONS[make(name, 0).config.model_type].arch for name, _ in MODELS}
    assert made | {"qwen3"} == FAMILIES.keys()


@pytest.mark.parametrize("pattern", [3, [True, False, False, True, True, False, True]])
def test_pattern_of_windows(pattern: Any, tmp_path: Path) -> None:
    """The key that llama.cpp reads of architectures with windows."""
    model = make("gemma3", 0, **IN_GGUF["gemma3"])
    key = "gemma3.attention.sliding_window_pattern"
    add = (lambda w: w.add_array(key, pattern)) if isinstance(pattern, list) else (lambda w: w.add_uint32(key, pattern))
    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), edit=add)
    flags = pattern if isinstance(pattern, list) else [True, True, False, True, True, False, True]
    assert open_checkpoint(tmp_path).config.windows == tuple(20 if flag else None for flag in flags)


ABSENT: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("gemma2", ("attn_logit_softcapping",), {"scores": Scores(10**-0.5, 50.0)}),
    ("gemma2", ("final_logit_softcapping",), {"logits_softcap": 30.0}),
    ("gemma2", ("attention.sliding_window",), {"windows": (4096, None)}),
    ("gemma3", ("attention.sliding_window",), {"windows": ()}),
    ("gemma3", ("rope.freq_base_swa",), {"local_rope_theta": 10000.0}),
    ("granite", ("attention.scale",), {"scores": Scores()}),
    ("granite", ("embedding_scale", "residual_scale"), {"embedding_scale": 1.0, "residual_scale": 1.0}),
]
"""Models, keys of their metadata, and what llama.cpp takes for them if they are not there."""


@pytest.mark.parametrize(("name", "keys", "fields"), ABSENT)
def test_absent_keys(name: str, keys: tuple[str, ...], fields: dict[str, Any], tmp_path: Path) -> None:
    model = make(name, 0, **IN_GGUF[name])

    def edit(w: gguf.GGUFWriter) -> None:
        for key in keys:
            del w.kv_data[0][f"{name}.{key}"]

    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), edit=edit)
    config = vars(open_checkpoint(tmp_path).config)
    assert {field: config[field] for field in fields} == fields


def test_numbers_for_each_layer(tmp_path: Path) -> None:
    """Files of Granite 4 without recurrent layers have as many KV heads for each layer."""
    model = make("granite", 0, **IN_GGUF["granite"])

    def edit(counts: list[int]) -> Any:
        def apply(w: gguf.GGUFWriter) -> None:
            w.kv_data[0].pop("granite.attention.head_count_kv")
            w.add_head_count_kv(counts)

        return apply

    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), edit=edit([4, 4]))
    assert open_checkpoint(tmp_path).config.num_kv_heads == 4
    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), edit=edit([4, 0]))
    expect_error(tmp_path, "granite.attention.head_count_kv differs from layer to layer")


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("granite", "granite.logit_scale", None, "granite.logit_scale is missing"),
        ("granite", "granite.logit_scale", 0.0, "granite.logit_scale is 0; it must be positive"),
        ("granite", "granite.rope.scaling.finetuned", False, "a model without rotary embedding"),
        ("granite", "granite.embedding_scale", 1e300, "is 1e+300; a number within float32 was expected"),
        ("gemma2", "gemma2.rope.freq_base_swa", 1e4, "gemma2.rope.freq_base_swa is set"),
        ("gemma3", "gemma3.attn_logit_softcapping", 50.0, "gemma3.attn_logit_softcapping is set"),
        ("gemma3", "gemma3.attention.key_length", 0, "gemma3.attention.value_length is 10; only 0 is supported"),
        ("smollm3", "smollm3.logit_scale", 2.0, "smollm3.logit_scale is set"),
        ("phi3", "phi3.rope.scaling.type", "longrope", "RoPE scaling longrope with 0 of the tensors"),
        ("granite", "granite.rope.dimension_count", 4, "granite.rope.dimension_count is 4; only 6 is supported"),
        ("phi3", "phi3.rope.dimension_count", 3, "3 elements of a head_dim of 6 rotate; an even number was expected"),
        ("phi3", "phi3.rope.dimension_count_swa", 4, "phi3.rope.dimension_count_swa is 4; only 6 is supported"),
    ],
)
def test_refuses(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    model = make(name, 0, **IN_GGUF.get(name, {}))

    def edit(w: gguf.GGUFWriter) -> None:
        w.kv_data[0].pop(key, None)
        add = {bool: w.add_bool, int: w.add_uint32, float: w.add_float64, str: w.add_string}
        if value is not None:
            add[type(value)](key, value)

    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), edit=edit)
    expect_error(tmp_path / "m.gguf", "m.gguf: ", message)


def test_damaged_metadata(tmp_path: Path) -> None:
    """Any number under any of its own keys: an error in one line, or no harm."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for name in ("gemma2", "gemma3", "granite", "phi3", "smollm3"):
        model = make(name, 0, **IN_GGUF.get(name, {}))

        def edit(w: gguf.GGUFWriter) -> None:
            key = rng.choice([key for key in w.kv_data[0] if not key.startswith("general")])
            w.kv_data[0][key].value = rng.choice([0, 1, 7, 255, 1 << 31])

        for _ in range(8):
            write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), edit=edit)
            try:
                open_checkpoint(tmp_path).close()
            except ModelError as error:
                assert "\n" not in str(error), seed
