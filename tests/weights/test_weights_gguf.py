"""GGUF files: every supported type, the un-permuted Q and K rows, and what is refused.

The oracles are the gguf package (files, quantization, reader) and transformers (the weights of a real model).
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QuantType
from support.gguf_files import gguf_names, write_gguf
from test_weights import compare, expect_error
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distmk.errors import ModelError
from distmk.model.config import ModelConfig
from distmk.model.rope import inv_freq
from distmk.weights import files, open_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
TYPES = (QuantType.F32, QuantType.F16, QuantType.BF16, QuantType.Q8_0, QuantType.Q4_0, QuantType.Q4_1)


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(11)
    if kind == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**SIZES, **changes))
    elif kind == "qwen2":
        sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}  # these models do not choose one
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **changes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **changes))
    for p in model.parameters():
        p.data = torch.randn_like(p)
    return model


def through(state: dict[str, torch.Tensor], kind: QuantType) -> dict[str, torch.Tensor]:
    """The matrices after the gguf package has quantized and dequantized them, row by row."""
    return {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(t.numpy(), kind), kind).copy()) if t.ndim == 2 else t
        for name, t in state.items()
    }


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_reads_what_gguf_wrote(
    tmp_path: Path, family: str, changes: dict[str, Any], kind: QuantType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK_ELEMENTS", 1500)  # so that tensors take several chunks
    model = tiny(family, **changes)
    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), kind)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path / "m.gguf"
    c = checkpoint.config
    assert c.family == family
    assert (c.tie_embeddings, c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm) == (
        "tie_word_embeddings" in changes,
        "attention_bias" in changes,
        "attention_bias" in changes,
        "mlp_bias" in changes,
        family == "qwen3",
    )
    assert (c.hidden_size, c.intermediate_size, c.num_layers, c.num_heads, c.num_kv_heads) == (64, 96, 2, 4, 2)
    assert (c.head_dim, c.vocab_size, c.max_position, c.rms_norm_eps, c.rope_theta) == (32, 101, 64, 1e-5, 10000.0)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    compare(checkpoint, through(model.state_dict(), kind), seed)


def test_same_tensors_as_the_gguf_reader(tmp_path: Path) -> None:
    """Names, shapes and offsets in the file, against the reader of the gguf package."""
    from distmk.weights.gguf_header import read_header, read_numbers, read_strings

    def edit(w: gguf.GGUFWriter) -> None:
        w.add_token_list(["a", "é", "", "b" * 300])
        w.add_token_types([1, 2, 3, 4])
        w.add_bool("x.flag", True)
        w.add_float64("x.f64", 0.1)
        w.add_int8("x.i8", -3)
        w.add_custom_alignment(64)

    model = tiny("qwen3")
    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), QuantType.Q4_0, edit)
    want, got = gguf.GGUFReader(tmp_path / "m.gguf"), read_header(tmp_path / "m.gguf")
    assert [(t.name, t.shape, t.type_id, t.offset) for t in got.tensors] == [
        (t.name, tuple(t.shape.tolist())[::-1], t.tensor_type.value, t.data_offset) for t in want.tensors
    ]
    for key, field in want.fields.items():
        if key.startswith("GGUF."):
            continue
        if key == "tokenizer.ggml.tokens":
            assert read_strings(got, key) == field.contents()
        elif key == "tokenizer.ggml.token_type":
            assert read_numbers(got, key) == field.contents()
        else:
            assert got.metadata[key] == field.contents(), key


def test_tensor_names_are_those_of_the_gguf_package() -> None:
    from distmk.weights.gguf_families import FAMILIES

    for family in ("llama", "qwen2", "qwen3"):
        model = tiny(family, **({} if family == "qwen2" else {"attention_bias": True}))
        for name, stored in gguf_names(model.config, model.state_dict()).items():
            assert FAMILIES[family].hf_name(stored) == name
    assert FAMILIES["llama"].hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"


def test_rope_factors(tmp_path: Path) -> None:
    """Llama 3.1's scaling, which the converter stores as a tensor of factors."""
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = tiny("llama", rope_parameters=rope)
    model.save_pretrained(tmp_path / "hf")
    scaled = open_checkpoint(tmp_path / "hf").config
    plain = ModelConfig(**{**vars(scaled), "rope_scaling": None})
    factors = (inv_freq(plain) / inv_freq(scaled)).astype(np.float32)
    write_gguf(
        tmp_path / "m.gguf", model.config, model.state_dict(), edit=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert config.rope_freq_factors == tuple(factors.tolist())
    np.testing.assert_allclose(inv_freq(config), inv_freq(scaled), rtol=3e-7)
    for kind in (QuantType.BF16, QuantType.F16):
        raw = gguf.quantize(factors, kind)
        write_gguf(
            tmp_path / "m.gguf",
            model.config,
            model.state_dict(),
            edit=lambda w, raw=raw, kind=kind: w.add_tensor("rope_freqs.weight", raw, raw_dtype=kind),
        )
        stored = open_checkpoint(tmp_path / "m.gguf").config.rope_freq_factors
        assert stored == tuple(gguf.dequantize(raw, kind).tolist())
    write_gguf(
        tmp_path / "m.gguf",
        model.config,
        model.state_dict(),
        edit=lambda w: w.add_tensor("rope_freqs.weight", factors[1:]),
    )
    expect_error(tmp_path / "m.gguf", "15 rotary frequency factors; head_dim 32 needs 16")


def test_rope_scaling(tmp_path: Path) -> None:
    """YaRN and linear scaling, by the keys that llama.cpp's converter writes for a config.json."""
    for kind, keys in (
        ("linear", {"factor": 2.5}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16}),
    ):
        model = tiny("llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4} | keys)
        model.save_pretrained(tmp_path / kind)

        def edit(w: gguf.GGUFWriter, kind: str = kind, keys: dict[str, Any] = keys) -> None:
            w.add_string("llama.rope.scaling.type", kind)
            w.add_rope_scaling_factor(keys["factor"])
            if kind == "yarn":
                w.add_rope_scaling_orig_ctx_len(16)
                w.add_float32("llama.rope.scaling.yarn_beta_fast", 32.0)

        write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), edit=edit)
        file, folder = open_checkpoint(tmp_path / "m.gguf").config, open_checkpoint(tmp_path / kind).config
        assert file.rope_scaling == folder.rope_scaling
        assert file.max_position == folder.max_position == (160 if kind == "linear" else 64)


def test_dummy_weights_with_a_gguf_config(tmp_path: Path) -> None:
    model = tiny("qwen3")
    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict())
    checkpoint = open_checkpoint(tmp_path / "m.gguf", "dummy", 5)
    assert checkpoint.config == open_checkpoint(tmp_path).config
    assert checkpoint.fingerprint != open_checkpoint(tmp_path).fingerprint


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 8), "a mixture of experts"),
        (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "RoPE scaling longrope with 0 of the tensors"),
        (lambda w: w.add_string("llama.rope.scaling.type", "new"), "RoPE scaling 'new' is not supported"),
        (
            lambda w: w.add_float32("llama.rope.scaling.factor", -4.0),
            "llama.rope.scaling.factor and attn_factor must be",
        ),
        (lambda w: w.add_uint32("llama.rope.dimension_count", 16), "llama.rope.dimension_count is 16"),
        (lambda w: w.add_bool("llama.attention.causal", False), "llama.attention.causal is False"),
        (lambda w: w.add_float32("llama.final_logit_softcapping", 30.0), "llama.final_logit_softcapping is set"),
        (lambda w: w.add_float32("llama.rope.scaling.attn_factor", 0.5), "llama.rope.scaling.attn_factor is set"),
        (lambda w: w.add_type("adapter"), "a GGUF file of type adapter"),
        (lambda w: w.add_float32("llama.logit_scale", 2.0), "llama.logit_scale is set"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts of a split GGUF, whose name"),
        (
            lambda w: (w.kv_data[0].pop("llama.feed_forward_length"), w.add_feed_forward_length([96, 64])),
            "llama.feed_forward_length differs from layer to layer",
        ),
        (
            lambda w: w.kv_data[0]["llama.block_count"].__setattr__("value", 1 << 30),
            "num_layers is 1073741824; at most",
        ),
        (lambda w: w.add_string("llama.attention.value_length", "a"), "llama.attention.value_length"),
        (lambda w: w.add_tensor("blk.0.new.weight", np.zeros(3, np.float32)), "tensor blk.0.new.weight"),
        (
            lambda w: w.add_tensor("a", np.zeros((2, 292), np.uint8), raw_dtype=QuantType.Q8_K),
            "tensor a has type Q8_K; supported are F32, F16, BF16, Q8_0, Q5_0",
        ),
    ],
)
def test_refuses(tmp_path: Path, edit: Any, message: str) -> None:
    model = tiny("llama")
    path = tmp_path / "m.gguf"

    def apply(w: gguf.GGUFWriter) -> None:
        w.kv_data[0].pop("llama.attention.value_length")  # the writer refuses a key that is there
        edit(w)

    write_gguf(path, model.config, model.state_dict(), edit=apply)
    expect_error(path, "m.gguf: ", message)


def test_refuses_other_models(tmp_path: Path) -> None:
    w = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    known = "supported are llama, qwen2, qwen3, phi3, gemma2, gemma3, granite, smollm3"
    expect_error(tmp_path / "m.gguf", f"m.gguf: GGUF architecture mamba is not supported; {known}")
    model = tiny("llama")
    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), drop="blk.1.attn_k.weight")
    expect_error(tmp_path / "m.gguf", "tensor model.layers.1.self_attn.k_proj.weight is missing", "[64, 64]")
    model.config.intermediate_size = 128
    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict())
    expect_error(tmp_path / "m.gguf", "mlp.gate_proj.weight has shape [96, 64]; the config calls for [128, 64]")


def test_damaged_files(tmp_path: Path) -> None:
    model = tiny("llama")
    path = tmp_path / "m.gguf"
    write_gguf(path, model.config, model.state_dict(), edit=lambda w: w.add_token_list([f"t{i}" for i in range(101)]))
    data = path.read_bytes()
    header_bytes = gguf.GGUFReader(path).data_offset
    path.write_bytes(b"")
    expect_error(path, "not a GGUF file: starts with b''")
    path.write_bytes(b"PK" + data)
    expect_error(path, "not a GGUF file")
    path.write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    expect_error(path, "GGUF version 1 is not supported")
    path.write_bytes(data[:4] + (3).to_bytes(4, "big") + data[8:])
    expect_error(path, "it is big-endian")
    path.write_bytes(data[:-1])
    expect_error(path, "cut short: has", "goes to byte")
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):  # cut anywhere in the header, or overwrite a few bytes of it: an error in one line, or no harm
        damaged = bytearray(data)
        if rng.random() < 0.3:
            del damaged[rng.randrange(4, header_bytes) :]
        else:
            at = rng.randrange(4, header_bytes)
            damaged[at : at + 4] = rng.randbytes(4)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path).close()
        except ModelError as e:
            assert "\n" not in str(e), seed


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to see a process's memory")
def test_half_a_real_model_takes_half_the_memory(smollm2: Path) -> None:
    code = """
import sys
from distmk.weights import expected_tensors, open_checkpoint
c = open_checkpoint(sys.argv[1])
kept = []
for name, shape in expected_tensors(c.config).items():
    if len(shape) == 2:
        by_row = "o_proj" not in name and "down_proj" not in name
        half = slice(0, shape[0 if by_row else 1] // 2)
        kept.append(c.read(name, half, None) if by_row else c.read(name, None, half))
# not ru_maxrss, which starts from the peak of the process that forked this one
peak_kib = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(sum(k.nbytes for k in kept), peak_kib * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code, str(smollm2)], capture_output=True, text=True, check=True)
    held_bytes, peak_bytes = map(int, done.stdout.split())
    assert held_bytes < 135 << 20
    assert peak_bytes - held_bytes < 64 << 20, f"{peak_bytes - held_bytes} bytes beyond the weights"
